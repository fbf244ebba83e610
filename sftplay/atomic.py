"""Files and folders that appear whole or not at all, small JSON files that may be broken, and locks between processes.

A scratch name lies next to the final one, on the same file system, so that one rename puts it in place.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from sftplay.errors import ConfigError

STILL_S = 30.0  # after this time the holder of a short lock is taken for a process that has been stopped


@contextmanager
def whole_file(path: Path, *, survives_power_cut: bool = True) -> Iterator[Path]:
    """A scratch path that replaces `path` when the block ends; for a device or a pipe it is that path itself.

    Waiting for the disk takes milliseconds. Without it a power cut may leave an empty file; a killed process may not.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        yield path
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield scratch
        if survives_power_cut:
            with scratch.open("rb") as handle:
                os.fsync(handle.fileno())
        scratch.replace(path)
    except OSError as error:  # a write names no file
        error.filename = str(path) if error.filename in (None, str(scratch)) else error.filename
        raise
    finally:
        with suppress(OSError):  # there is nothing to remove where it could not be made
            scratch.unlink()


def write_text(path: Path, text: str) -> None:
    """Write a small file so that a reader sees the old content or the new, never half of it."""
    with whole_file(path) as scratch:
        scratch.write_text(text, encoding="utf-8")


def write_bytes(path: Path, content: bytes) -> None:
    """As `write_text`, for bytes."""
    with whole_file(path) as scratch:
        scratch.write_bytes(content)


def read_object(path: Path) -> dict[str, Any]:
    """The file's object; empty where there is none."""
    return examine_object(path)[0]


def examine_object(path: Path) -> tuple[dict[str, Any], str]:
    """The file's object, and why it has none; both are empty for no file. OSError: it cannot be read just now."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}, ""
    except OSError as error:
        # The file may be whole all the same, and whoever took it for empty would write over it.
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.EIO, errno.ENOMEM, errno.ESTALE):
            raise
        return {}, f"cannot be read ({error.strerror})"
    except (ValueError, RecursionError):
        return {}, "is no JSON"
    return (content, "") if isinstance(content, dict) else ({}, "holds no JSON object")


def read_lines(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """The objects of a file with one a line, and the numbers of lines without one; a last line cut off is ignored."""
    objects, broken = [], []
    *lines, last = path.read_bytes().split(b"\n") if path.exists() else [b""]
    for number, raw in enumerate([*lines, last], start=1):
        try:
            content = json.loads(raw.decode("utf-8", "replace")) if raw.strip() else {}
        except (ValueError, RecursionError):
            content = None
        if isinstance(content, dict):
            objects += [content] if content else []
        elif number <= len(lines):
            broken.append(number)
    return objects, broken


def read_tail(path: Path, *, first_bytes: int = 2**16, most_bytes: int = 2**24) -> list[dict[str, Any]]:
    """Return the objects of the last lines of a file with one a line, oldest first; a last line cut off is ignored.

    It reads `first_bytes`, and up to `most_bytes` where no whole object lies in these. OSError: it cannot be read.
    """
    with path.open("rb") as file:
        size, length = file.seek(0, os.SEEK_END), first_bytes
        while True:
            file.seek(max(0, size - length))
            lines = file.read(length).split(b"\n")
            objects = []
            for raw in lines[length < size :]:  # the first of them lacks its beginning
                with suppress(ValueError, RecursionError):
                    objects += [content] if isinstance(content := json.loads(raw), dict) else []
            if objects or length >= min(size, most_bytes):
                return objects
            length *= 16


@contextmanager
def whole_folder(path: Path, *, replaces: bool = False) -> Iterator[Path]:
    """An empty scratch folder that becomes `path` when the block ends; an older `path` stays until then.

    The scratch folder of a killed process is removed first: where several processes may come, the caller must hold a
    lock. Raises OSError if `path` exists, and `replaces` is False.
    """
    scratch = unfinished_folder(path)
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        yield scratch
        _put_in_place(scratch, path, replaces=replaces)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def unfinished_folder(path: Path) -> Path:
    """Where `path` is made by `whole_folder` or `resumed_folder`."""
    return path.with_name(f".{path.name}.part")


@contextmanager
def resumed_folder(path: Path) -> Iterator[Path]:
    """As `whole_folder` with `replaces`, but a killed process's folder is continued. An error removes it."""
    scratch = unfinished_folder(path)
    scratch.mkdir(parents=True, exist_ok=True)
    try:
        yield scratch
        _put_in_place(scratch, path, replaces=True)
    except Exception:  # a stop signal is none, and keeps it
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _put_in_place(scratch: Path, path: Path, *, replaces: bool) -> None:
    old = path.with_name(f".{path.name}.old")
    use_umask(scratch)
    if replaces and path.exists():
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
    scratch.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def use_umask(folder: Path) -> None:
    """Give each file below `folder` the mode of a new file; safetensors writes files that only their owner can read."""
    probe = folder / ".new"
    probe.touch()
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(mode)


@contextmanager
def locked(path: Path, *, waits: bool = True) -> Iterator[None]:
    """Hold a lock on a folder or file, which is made if missing. BlockingIOError if it is taken, without `waits`."""
    while True:
        handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(path.stat(), os.fstat(handle)):
                yield
                return
        finally:
            os.close(handle)
        path.parent.mkdir(parents=True, exist_ok=True)  # who held it has moved or removed it


@contextmanager
def locked_if_possible(path: Path) -> Iterator[None]:
    """Hold a lock for a change of milliseconds; run without where there are none, or its holder stands still."""
    with ExitStack() as held:
        deadline = time.monotonic() + STILL_S
        while True:
            try:
                held.enter_context(locked(path, waits=False))
            except BlockingIOError:
                if time.monotonic() < deadline:
                    time.sleep(0.005)
                    continue
            except OSError:  # no locks here, a full disk, or the folder has gone
                pass
            break
        yield


def is_locked(path: Path) -> bool:
    """True when a process holds the file `path` by `locked`. Several may ask at the same time."""
    try:
        with path.open("rb") as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def check_target(out: Path) -> None:
    """Refuse to write a folder over anything: raise ConfigError where `out` exists."""
    if out.exists() or out.is_symlink():
        raise ConfigError("exists already", where=str(out), fix="remove it, or name another folder with OUT=")


def follow_link(folder: Path) -> Path:
    """The folder that a link such as outputs/latest leads to: a run goes by its own name."""
    return folder.parent / folder.readlink() if folder.is_symlink() else folder


def check_new_file(path: Path) -> None:
    """Raise ConfigError when `path` exists already, or when its folder cannot be made or written."""
    if path.exists() or path.is_symlink():
        raise ConfigError("exists already", where=str(path), fix="choose another file with OUT=, or remove that one")
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        problem = f"cannot be written: {above} is {'not writable' if above.is_dir() else 'a file'}"
        raise ConfigError(problem, where=str(path), fix="choose another file with OUT=")
