"""Finds the documents below a folder. Whatever is not taken is named with its reason; nothing is opened."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from sftplay.data.ingest.by_kind import SUFFIXES
from sftplay.data.ingest.settings import ROWS
from sftplay.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Found:
    """A file or folder of the walk; a document to be read where it has no reason."""

    name: str
    """Below the folder, with `/` between the parts."""

    path: Path
    size: int = 0
    mtime_ns: int = 0
    reason: str = ""
    detail: str = ""
    is_fault: bool = False
    """It may hold text that cannot be had, so that it counts as unreadable. Else it is only passed over."""


def walk(source: Path, own: Collection[Path]) -> list[Found]:
    """Everything below a folder, sorted by name, or the one file. `own` are files of the kit's, which are left out.

    Raises:
        DataError: there is no such folder or file.
    """
    try:
        mode = source.stat().st_mode
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise DataError(
            f"cannot be read: {why}", where=str(source), fix="name a folder of documents with IN="
        ) from None
    if not stat.S_ISDIR(mode):
        return [_file(source, source.name, is_named=True)]
    mine = {os.path.realpath(path) for path in own}
    found = [each for each in _below(source) if os.path.realpath(each.path) not in mine]
    return sorted(found, key=lambda each: each.name.split("/"))


def shown(name: str) -> str:
    """A file's name as UTF-8 text: bytes that are none become escapes."""
    return name.encode("utf-8", "backslashreplace").decode()


def _below(source: Path) -> Iterator[Found]:
    errors: list[OSError] = []
    for place, folders, names in os.walk(source, onerror=errors.append):
        for name in sorted(folders):
            path = Path(place, name)
            if name.startswith("."):
                yield _passed_over(path, source, reason="hidden", detail="a hidden folder")
            elif path.is_symlink():
                yield _passed_over(path, source, reason="link_to_folder", detail=f"to {path.readlink()}")
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(place, name)
            if name.startswith("."):
                yield _passed_over(path, source, reason="hidden", detail="a hidden file")
            else:
                yield _file(path, _name(path, source))
    for error in errors:
        path = Path(os.fsdecode(error.filename))
        name, why = _name(path, source), error.strerror or str(error)
        yield Found(name=name, path=path, reason="not_readable", detail=f"a folder: {why}", is_fault=True)


def _file(path: Path, name: str, *, is_named: bool = False) -> Found:
    try:
        facts = path.stat()
    except OSError as error:
        is_loop = path.is_symlink() and "symbolic links" in (error.strerror or "")
        reason = "link_loop" if is_loop else "broken_link" if path.is_symlink() else "not_readable"
        return Found(name=name, path=path, reason=reason, detail=error.strerror or str(error), is_fault=True)
    if not stat.S_ISREG(facts.st_mode):
        return Found(name=name, path=path, reason="special_file", detail=_kind(facts.st_mode), is_fault=True)
    suffix = path.suffix.lower()
    if not is_named and suffix not in SUFFIXES and not path.name.lower().endswith(ROWS):
        detail = f"no document by its name, which ends in {suffix!r}" if suffix else "a name without an ending"
        return Found(name=name, path=path, reason="other_kind", detail=detail)
    return Found(name=name, path=path, size=facts.st_size, mtime_ns=facts.st_mtime_ns)


def _passed_over(path: Path, source: Path, *, reason: str, detail: str) -> Found:
    return Found(name=_name(path, source), path=path, reason=reason, detail=detail)


def _name(path: Path, source: Path) -> str:
    """A path below the folder as text, whatever bytes it is made of."""
    return path.relative_to(source).as_posix() if path != source else "."


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFIFO: "a named pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFBLK: "a device",
        stat.S_IFCHR: "a device",
    }
    return kinds.get(stat.S_IFMT(mode), "neither a file nor a folder")
