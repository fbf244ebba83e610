"""The documents of a run of ingest: its settings, the files that it finds, and the child processes that read them."""

from __future__ import annotations

import ctypes
import errno
import gc
import hashlib
import json
import os
import resource
import select
import shutil
import signal
import stat
import subprocess
import sys
import time
import traceback
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NoReturn

from sftplay import __version__
from sftplay.atomic import locked, read_object, write_text
from sftplay.data.ingest.extract.document import SUFFIXES
from sftplay.errors import ConfigError, DataError, MachineError
from sftplay.places import ROOT
from sftplay.signals import TiedPopen, die_with_parent

CLEANING = ("encoding", "unicode", "control", "spaces")
STEPS = (*CLEANING, "boilerplate", "duplicates", "near_duplicates")
"""Every step that can be left out with `--without`."""

ROWS = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz", ".parquet")
"""Files with one document in each row; only their column `text` is read, and it is not cleaned."""

Unit = Literal["document", "section"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    source: Path
    """A folder, or one file."""

    out: Path
    by: Unit = "document"
    without: tuple[str, ...] = ()
    near: float = 0.8
    """The least similarity at which the later of two texts is dropped."""

    min_chars: int = 50
    max_chars: int | None = None
    languages: tuple[str, ...] = ()
    """ISO 639-1 codes of those that are kept. Empty: all."""

    encoding: str = "auto"
    """Of text files without a byte order mark."""

    limit_s: float = 30.0
    """For one file. A streamed file gets one more second for each 4 MB."""

    memory_bytes: int = 10**9
    """For one file's reader."""

    workers: int = 1
    bad_files: Literal["report", "error"] = "report"
    tokenizer: str = ""

    def does(self, step: str) -> bool:
        return step not in self.without

    def reading_options(self) -> dict[str, Any]:
        """Return all settings that decide what is read from a file."""
        cleaned = [step for step in CLEANING if self.does(step)]
        lines = self.does("boilerplate")
        return {"kit": __version__, "encoding": self.encoding, "cleaning": cleaned, "lines": lines}

    def finishing_options(self) -> dict[str, Any]:
        """Return all settings that decide which records are made of what was read."""
        filters = {"min_chars": self.min_chars, "max_chars": self.max_chars, "languages": self.languages}
        return {"by": self.by, "signatures": self.does("near_duplicates"), "near": self.near, **filters}

    def all_options(self) -> dict[str, Any]:
        """Return all settings that OUT depends on."""
        compared = [step for step in ("duplicates", "near_duplicates") if self.does(step)]
        return {"reading": self.reading_options(), "finishing": self.finishing_options(), "compared": compared}


ERRORS = "errors.txt"
"""In the work folder: the output of libraries, and the tracebacks of children that died."""

SPECIAL_FILES = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
SPECIAL_FILES |= {stat.S_IFBLK: "a device", stat.S_IFCHR: "a device"}


class WorkFolder:
    """The folder of intermediate results, and the names in it."""

    def __init__(self, out: Path) -> None:
        self.folder = out.with_name(f".{out.name}.ingest")

    @contextmanager
    def opened(self) -> Iterator[WorkFolder]:
        """Hold the folder for this process alone, and remove it at the end of a block that raises nothing.
        Raise ConfigError where another process makes the same OUT, or nothing can be written there.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot be written: {error.strerror}", where=str(self.folder.parent)) from error
        try:
            with locked(self.folder / "lock", waits=False):
                yield self
                shutil.rmtree(self.folder, ignore_errors=True)
        except BlockingIOError:
            fix = "wait for it, or choose another OUT"
            raise ConfigError("another process makes this file now", where=str(self.folder), fix=fix) from None

    def stem(self, parts: dict[str, Any]) -> str:
        """Return the stem for the result of a stage; the result depends on these parts."""
        return str(self.folder / hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32])


def answer_path(stem: str) -> str:
    """Return the file with the answer of a stage, which is written after all else of the stage."""
    return f"{stem}.json"


def read_answer(stem: str) -> dict[str, Any] | None:
    """Return the answer of a stage; None where it has not ended."""
    return read_object(Path(answer_path(stem))) or None


def forget(stem: str) -> None:
    for path in Path(stem).parent.glob(f"{Path(stem).name}.*"):
        path.unlink(missing_ok=True)


@dataclass(frozen=True, kw_only=True)
class WalkEntry:
    """A file or folder of the walk; without a reason it is a document to read."""

    name: str
    """Below the folder, with `/` between the parts."""

    path: Path
    size: int = 0
    mtime_ns: int = 0
    reason: str = ""
    detail: str = ""
    is_fault: bool = False
    """It may hold text that cannot be read, so it counts as unreadable. Else it is skipped."""


def walk(source: Path, left_out: Collection[Path]) -> list[WalkEntry]:
    """Return everything below a folder, sorted by name, or the one file, without the files in `left_out`.
    Raise DataError where there is no such folder or file.
    """
    try:
        mode = source.stat().st_mode
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        fix = "name a folder of documents with IN="
        raise DataError(f"cannot be read: {why}", where=str(source), fix=fix) from None
    if not stat.S_ISDIR(mode):
        return [_file(source, source.name, is_named=True)]
    kit_files = {os.path.realpath(path) for path in left_out}
    found = [entry for entry in _below(source) if os.path.realpath(entry.path) not in kit_files]
    return sorted(found, key=lambda entry: entry.name.split("/"))


def shown(name: str) -> str:
    """Return a file's name as UTF-8 text, with other bytes as escapes."""
    return name.encode("utf-8", "backslashreplace").decode()


def _below(source: Path) -> Iterator[WalkEntry]:
    errors: list[OSError] = []
    for folder, folders, files in os.walk(source, onerror=errors.append):
        for place in sorted(folders):
            path = Path(folder, place)
            name = path.relative_to(source).as_posix()
            if place.startswith("."):
                yield WalkEntry(name=name, path=path, reason="hidden", detail="a hidden folder")
            elif path.is_symlink():
                yield WalkEntry(name=name, path=path, reason="link_to_folder", detail=f"to {path.readlink()}")
        folders[:] = [place for place in folders if not place.startswith(".")]
        for path in (Path(folder, file) for file in files):
            name = path.relative_to(source).as_posix()
            if path.name.startswith("."):
                yield WalkEntry(name=name, path=path, reason="hidden", detail="a hidden file")
            else:
                yield _file(path, name)
    for error in errors:
        path, why = Path(os.fsdecode(error.filename)), f"a folder: {error.strerror or error}"
        name = path.relative_to(source).as_posix()  # "." for the folder itself
        yield WalkEntry(name=name, path=path, reason="not_readable", detail=why, is_fault=True)


def _file(path: Path, name: str, *, is_named: bool = False) -> WalkEntry:
    try:
        facts = path.stat()
    except OSError as error:
        is_loop = path.is_symlink() and "symbolic links" in (error.strerror or "")
        reason = "link_loop" if is_loop else "broken_link" if path.is_symlink() else "not_readable"
        return WalkEntry(name=name, path=path, reason=reason, detail=error.strerror or str(error), is_fault=True)
    if not stat.S_ISREG(facts.st_mode):
        detail = SPECIAL_FILES.get(stat.S_IFMT(facts.st_mode), "neither a file nor a folder")
        return WalkEntry(name=name, path=path, reason="special_file", detail=detail, is_fault=True)
    suffix = path.suffix.lower()
    if not is_named and suffix not in SUFFIXES and not path.name.lower().endswith(ROWS):
        detail = f"no document by its name, which ends in {suffix!r}" if suffix else "a name without an ending"
        return WalkEntry(name=name, path=path, reason="other_kind", detail=detail)
    return WalkEntry(name=name, path=path, size=facts.st_size, mtime_ns=facts.st_mtime_ns)


PR_SET_CHILD_SUBREAPER = 36

FULL = (errno.ENOSPC, errno.EDQUOT)
NO_ROOM_CODE = 28
"""Exit code of a child that found the disk full. The file that it reads is not at fault."""


def serve(requests: int, answers: int) -> None:
    """Start the requested tasks until the request pipe is closed."""
    children: dict[int, dict[str, Any]] = {}  # pid -> its task, with what is known of the child
    rest = b""
    woken, wakes = os.pipe()
    for end in (woken, wakes):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the requesting process handles Ctrl-C of a terminal
    if sys.platform == "linux":  # orphans of a child become ours, so that we find them
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    while True:
        # While there are children, their memory is checked every 0.05 s.
        ready, _, _ = select.select([requests, woken], [], [], 0.05 if children else None)
        if woken in ready:
            os.read(woken, 1 << 12)
        if requests in ready:
            given = os.read(requests, 1 << 16)
            if not given:
                break
            *lines, rest = (rest + given).split(b"\n")
            for task in map(json.loads, lines):
                pid = os.fork()
                if pid == 0:
                    _run(task, os.getppid())
                children[pid] = {**task, "began": time.monotonic(), "peak_bytes": 0, "killed_for": ""}
        _reap(children, answers)
        for pid, child in children.items():
            held = _held_bytes(pid)
            child["peak_bytes"] = max(child["peak_bytes"], held)
            if child["memory_bytes"] and held > child["memory_bytes"]:
                child["killed_for"] = "memory"
            elif child["limit_s"] and time.monotonic() - child["began"] > child["limit_s"]:
                child["killed_for"] = child["killed_for"] or "timeout"
            if child["killed_for"]:
                _kill(pid)
    for pid in list(children):
        _kill(pid)


def _reap(children: dict[int, dict[str, Any]], answers: int) -> None:
    """Report how children have ended, and kill the processes that they left."""
    while children:
        try:
            pid, status, used = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            break
        child = children.pop(pid, None)
        if child is not None:
            answer = {
                "number": child["number"], "exit_code": os.waitstatus_to_exitcode(status),
                "killed_for": child["killed_for"], "seconds": time.monotonic() - child["began"],
                "peak_bytes": max(used.ru_maxrss * 1024, child["peak_bytes"]),
            }  # fmt: skip
            os.write(answers, json.dumps(answer).encode() + b"\n")
        for stray in set(_list_children(os.getpid())) - set(children):
            _kill(stray)


def _run(task: dict[str, Any], server: int) -> NoReturn:
    """Run the child: set bounds, run the task, write its answer to a file. Never returns."""
    code = 1
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        die_with_parent(server)
        quiet, errors = os.open(os.devnull, os.O_RDWR), os.dup(2)
        for stream in (0, 1, 2):
            os.dup2(quiet, stream)
        # RLIMIT_DATA counts the process's private memory, as RLIMIT_AS does, but not mapped libraries and files.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        bounds = {resource.RLIMIT_DATA: task["memory_bytes"], resource.RLIMIT_FSIZE: task["most_file_bytes"]}
        for limit, most in bounds.items():
            if most:
                resource.setrlimit(limit, (most, most))
        module, _, function = task["function"].rpartition(".")
        answer = getattr(import_module(module), function)(**task["arguments"])
        write_text(Path(task["answer"]), json.dumps(answer))
        code = 0
    except BaseException as error:  # noqa: BLE001 - the child ends here: its traceback is kept
        code = NO_ROOM_CODE if isinstance(error, OSError) and error.errno in FULL else 1
        with suppress(OSError, MemoryError):
            os.write(errors, traceback.format_exc(limit=-30).encode())
    finally:
        os._exit(code)


def _kill(pid: int) -> None:
    for end in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            end(pid, signal.SIGKILL)


def _list_children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _held_bytes(pid: int) -> int:
    """Return the memory of a process and all that it started, with pages of files; 0 where it is unknown."""
    try:
        held = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0
    return held + sum(map(_held_bytes, _list_children(pid)))


def main() -> None:
    requests, answers = os.dup(0), os.dup(1)
    os.dup2(2, 1)  # the output of a library must not look like an answer
    for call in sys.argv[1:]:
        module, *words = call.split(":")
        import_module(module).warm_up(*words)
    gc.collect()
    gc.freeze()
    serve(requests, answers)


if __name__ == "__main__":
    main()


ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "MALLOC_ARENA_MAX": "2",
    "TOKENIZERS_PARALLELISM": "false",
}
"""The server's environment: who forks must have one thread, and memory must come from the system to be counted."""


@dataclass(frozen=True, kw_only=True)
class ChildTask:
    function: str
    """`package.module.function`; it returns what JSON can hold."""

    arguments: dict[str, Any] = field(default_factory=dict)
    answer: str
    """The file that gets what the function returns."""

    limit_s: float | None = None
    memory_bytes: int | None = None
    most_file_bytes: int | None = None


@dataclass(frozen=True)
class ChildEnd:
    task: ChildTask
    exit_code: int
    """0 where the task's answer is complete."""

    killed_for: str
    """`timeout`, `memory`, or nothing."""

    seconds: float
    peak_bytes: int


class ChildPool:
    """Runs tasks in `size` children side by side."""

    def __init__(self, size: int, *, warmed: Iterable[str], errors: Path) -> None:
        """Call `module.warm_up(word, ...)` once for all children, for each `module:word:...` of `warmed`.

        `errors` gets what libraries print.
        """
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._size, self._errors = size, errors
        with errors.open("ab") as stream:
            self._server = TiedPopen(
                [sys.executable, "-m", __name__, *warmed], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=stream, env={**os.environ, **ONE_THREAD, "PYTHONPATH": path},
                start_new_session=True,
            )  # fmt: skip

    def __enter__(self) -> ChildPool:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self._server.stdin, self._server.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):  # the server has ended already
                    stream.close()
        self._server.wait()

    def run(self, tasks: Iterable[ChildTask]) -> Iterator[ChildEnd]:
        """Yield the end of each task, in the order in which they end. A task is taken only when a child is free.
        Raise MachineError where the server was killed.
        """
        running: dict[int, ChildTask] = {}
        assert self._server.stdin is not None
        for number, task in enumerate(tasks):
            running[number] = task
            request = {"number": number, **asdict(task)}
            try:
                self._server.stdin.write(json.dumps(request).encode() + b"\n")
                self._server.stdin.flush()
            except BrokenPipeError:
                raise self._describe_end() from None
            if len(running) == self._size:
                yield self._wait(running)
        while running:
            yield self._wait(running)

    def _wait(self, running: dict[int, ChildTask]) -> ChildEnd:
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        if not line:
            raise self._describe_end()
        answer = json.loads(line)
        return ChildEnd(task=running.pop(answer.pop("number")), **answer)

    def _describe_end(self) -> MachineError:
        code = self._server.wait()
        last_line = self._errors.read_text(errors="replace").strip().rpartition("\n")[2]
        what = f"the process that starts readers has ended (code {code}{': ' + last_line if last_line else ''})"
        return MachineError(what, where="ingest", fix="free memory; the same command goes on where this one stopped")
