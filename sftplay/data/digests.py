"""Digests of the rows of files and hub data sets, kept while no file changes."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from sftplay.atomic import read_object, write_text
from sftplay.data.cache import fingerprint
from sftplay.data.files import list_files
from sftplay.data.read import describe_unreadable, is_hub_name
from sftplay.errors import DataError


def content_digest(path: str) -> str:
    """Return a hex digest that changes whenever a byte of the rows, or a file's name in a folder, changes.

    Whole files are hashed, at about 1 GB/s: size and time stamp alone miss an edit made within the clock's grain.
    """
    if is_hub_name(path):
        from sftplay.data.tables import hub_digest

        return hub_digest(path)
    digest = hashlib.blake2b()
    for file in list_files(path):
        digest.update(str(file.relative_to(path)).encode() + b"\0" + file_digest(file))
    return digest.hexdigest()[:32]


def file_digest(file: Path) -> bytes:
    """Return the digest of all bytes of a file, or raise DataError where it cannot be read."""
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "blake2b").digest()
    except OSError as error:
        raise describe_unreadable(file, 0, error=error) from error


FOLDER = "digests"
WORTH_BYTES = 1 << 24  # smaller files are hashed at once
GRAIN_NS = 2_000_000_000
"""Two changes within the clock's grain leave one stamp. A file that was changed so shortly before is hashed again."""


def kept_digest(path: str, folder: str) -> str:
    """As `content_digest`; the digest of a large file or folder is kept below `folder` while no file's stamp changes.
    Raise DataError where a file cannot be read.
    """
    if is_hub_name(path):
        return content_digest(path)
    stamps = _read_stamps(path)
    if sum(stamp[1] for stamp in stamps) < WORTH_BYTES:
        return content_digest(path)
    note = Path(folder) / FOLDER / f"{fingerprint({'path': str(Path(path).absolute())})}.json"
    known = read_object(note)
    if known.get("stamps") == stamps:
        return str(known["digest"])
    began = time.time_ns()
    digest = content_digest(path)
    if max(stamp[4] for stamp in stamps) < began - GRAIN_NS and _read_stamps(path) == stamps:
        with suppress(OSError):
            write_text(note, json.dumps({"path": path, "stamps": stamps, "digest": digest}))
    return digest


def _read_stamps(path: str) -> list[list[Any]]:
    """Name, size, inode, and the times in ns of the last change of content, and of anything: no program sets that."""
    found = [(str(file), file.stat()) for file in list_files(path)]
    return [[name, stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns] for name, stat in found]


def expect_unchanged(digests: Mapping[str, str], folder: str) -> None:
    """Raise DataError when a file was written to while it was read: new rows would lie under the old digest.

    `digests` are those of `kept_digest` from before, with the same `folder`.
    """
    for path, digest in digests.items():
        if kept_digest(path, folder) != digest:
            fix = "start again when nothing writes to it any more"
            raise DataError("has changed while it was read", where=path, fix=fix)
