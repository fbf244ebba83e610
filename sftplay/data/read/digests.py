"""Digests of large files, kept with the files' stamps: a corpus is not read again at every start of every process."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from sftplay.atomic import read_object, write_text
from sftplay.data.cache import fingerprint
from sftplay.data.read.files import list_files
from sftplay.data.read.sources import content_digest, is_hub_name

FOLDER = "digests"
WORTH_BYTES = 1 << 24  # smaller files are hashed at once
GRAIN_NS = 2_000_000_000
"""Two changes within the clock's grain leave one stamp. A file that was changed so shortly before is hashed again."""


def kept_digest(path: str, folder: Path) -> str:
    """As `content_digest`; the digest of a large file or folder is kept below `folder` while no file's stamp changes.

    Raises DataError: a file cannot be read.
    """
    if is_hub_name(path):
        return content_digest(path)
    stamps = _read_stamps(path)
    if sum(stamp[1] for stamp in stamps) < WORTH_BYTES:
        return content_digest(path)
    note = folder / FOLDER / f"{fingerprint({'path': str(Path(path).absolute())})}.json"
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
