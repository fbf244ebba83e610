"""Keep the answers so far in a file next to the final one. A killed `infer-batch` continues from it.

Its first line names the run, rows and settings of the answers; each further line holds one batch. This module knows
nothing of models.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from sftplay.errors import ConfigError, MachineError, RunError
from sftplay.launch.run_folder import RunFolder

HEADER = '{"answers of": '
"""The beginning of the file. A file with another beginning is left alone."""

FIX_SPACE = "make room, and start the same command again: it continues where it stopped"


def fingerprint_run(folder: RunFolder) -> str:
    """Return the hex digest of a run's config and of the names, sizes and times of its weights' files."""
    digest = hashlib.blake2b(folder.resolved.read_bytes(), digest_size=16)
    for part in (folder.result, folder.path / "base"):
        for file in sorted(part.rglob("*")) if part and part.is_dir() else ():
            facts = file.stat()
            digest.update(f"{file.relative_to(folder.path)} {facts.st_size} {facts.st_mtime_ns}\n".encode())
    return digest.hexdigest()


class PartialAnswers:
    """The side file of `out`: `<out>.part`."""

    def __init__(self, out: Path, fingerprint: dict[str, Any]) -> None:
        """`fingerprint` is everything that decides the answers: name -> value."""
        self.path = out.with_name(f"{out.name}.part")
        self.n_batches = self.n_answers = 0
        self._fingerprint = fingerprint
        self._handle: BinaryIO | None = None

    @contextmanager
    def held(self) -> Iterator[PartialAnswers]:
        """Lock the file for this process and read the answers of an earlier one; a torn last line is cut off.

        Raise ConfigError where another process holds it, it is another kind of file, or its answers belong to something
        else; MachineError where it cannot be made.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle = self.path.open("a+b")
        except OSError as error:
            what = f"cannot be written ({error.strerror})"
            raise MachineError(what, where=str(self.path), fix="choose another file with OUT=") from error
        with handle:
            self._lock(handle)
            self._handle = handle
            try:
                self._read(handle)
                yield self
            finally:
                self._handle = None
                if self.path.exists() and not self.path.stat().st_size:
                    self.path.unlink()

    def append(self, answers: list[tuple[int, Any]]) -> None:
        """Append one batch of (row number, answer as JSON); it is on the disk when this returns. Raise RunError where
        it cannot be written.
        """
        assert self._handle is not None, "the file is written while it is held"
        head = "" if self.n_batches else HEADER + json.dumps(self._fingerprint) + "}\n"
        data = (head + json.dumps(answers) + "\n").encode()
        file = self._handle.fileno()
        try:
            while data:
                data = data[os.write(file, data) :]
            os.fsync(file)
        except OSError as error:
            what = f"cannot be written ({error.strerror}); {self.n_answers} answers are kept in it"
            raise RunError(what, where=str(self.path), fix=FIX_SPACE) from error
        self.n_batches += 1
        self.n_answers += len(answers)

    def answers(self) -> Iterator[list[tuple[int, Any]]]:
        """Yield every batch, one after another."""
        with self.path.open("rb") as lines:
            next(lines, None)
            for line in lines:
                yield [(number, answer) for number, answer in json.loads(line)]

    def remove(self) -> None:
        """Remove the file, after its answers were written elsewhere."""
        self.path.unlink(missing_ok=True)

    def _lock(self, handle: BinaryIO) -> None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released when this process ends
            if os.path.samestat(os.fstat(handle.fileno()), self.path.stat()):
                return
        except (BlockingIOError, FileNotFoundError):
            pass
        what = "another process is writing answers into it"
        raise ConfigError(what, where=str(self.path), fix="wait for it to end, or choose another file with OUT=")

    def _read(self, handle: BinaryIO) -> None:
        handle.seek(0)
        head = handle.readline()
        if head and head.endswith(b"\n"):
            try:
                stored = json.loads(head)["answers of"] if head.startswith(HEADER.encode()) else None
            except (ValueError, KeyError):
                stored = None
            if not isinstance(stored, dict):
                raise self._refuse_other_file()
            current = self._fingerprint
            different = [
                f"{name} was {stored.get(name)!r} and is {current.get(name)!r} now"
                for name in [*current, *(name for name in stored if name not in current)]
                if stored.get(name) != current.get(name)
            ]
            if different:
                what = f"its answers belong to something else: {'; '.join(different)}"
                fix = "ask as before, or remove that file to start again"
                raise ConfigError(what, where=str(self.path), fix=fix)
        elif not HEADER.encode().startswith(head[: len(HEADER)]):
            raise self._refuse_other_file()
        good = handle.tell() if head.endswith(b"\n") else 0
        for line in handle:
            try:
                n = len(json.loads(line)) if line.endswith(b"\n") else None
            except ValueError:
                n = None
            if n is None:  # an incomplete line
                break
            good += len(line)
            self.n_batches, self.n_answers = self.n_batches + 1, self.n_answers + n
        # Without a batch the header is written again, together with the first one.
        handle.truncate(good if self.n_batches else 0)

    def _refuse_other_file(self) -> ConfigError:
        what = "is in the way: it is not a file of partial answers"
        return ConfigError(what, where=str(self.path), fix="move it away, or choose another file with OUT=")
