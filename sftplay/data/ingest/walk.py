"""The settings of a run of ingest, and the files that it finds."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sftplay import __version__
from sftplay.atomic import locked, read_object
from sftplay.data.ingest.extract.document import SUFFIXES
from sftplay.errors import ConfigError, DataError

CLEANING = ("encoding", "unicode", "control", "spaces")
STEPS = (*CLEANING, "boilerplate", "duplicates", "near_duplicates")
"""Every step that can be left out with `--without`."""

ROWS = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz", ".parquet")
"""Files with one document in each row; only their column `text` is read, and it is not cleaned."""

Unit = Literal["document", "section"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One ingestion."""

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
