"""The cache of prepared rows: its folders and their keys, digests of the files, the lengths of the rows."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from sftplay.atomic import locked, read_object, resumed_folder, whole_folder, write_text
from sftplay.config.data import row_paths
from sftplay.config.run import RunConfig
from sftplay.data.files import list_files
from sftplay.data.read import describe_unreadable, is_hub_name
from sftplay.errors import ConfigError, DataError, RunError

BLOCK_BYTES, SAMPLED_BYTES = 1 << 20, 1 << 28

SEAL = "SEAL.json"  # name of the file, written last, that lists size and checksum of all others


def fingerprint(parts: Mapping[str, Any]) -> str:
    """Sixteen hex digits that change when any of `parts` (json values) changes."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def ensure_folder(
    folder: Path, write_files: Callable[[Path], None], *, resumes: bool = False, setting: str = "data.processed_dir"
) -> Path:
    """Return `folder`, sound and complete; `write_files(unfinished)` fills it first if it is missing or damaged.

    One process makes it while others wait. With `resumes`, `write_files` gets what a killed one has left.
    Raise ConfigError where nothing can be written, RunError where there is no room; `setting` sets the place.
    """
    if is_sound(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.with_name(f"{folder.name}.lock")):
            if not is_sound(folder):
                with resumed_folder(folder) if resumes else whole_folder(folder, replaces=True) as unfinished:
                    write_files(unfinished)
                    (unfinished / SEAL).write_text(json.dumps({"files": _checksums(unfinished)}), encoding="utf-8")
    except BrokenPipeError:  # the reader of our output has ended; the folder is not at fault
        raise
    except OSError as error:
        where = str(folder.parent)
        reason = os.strerror(error.errno) if error.errno else str(error)  # without the words that arrow puts around it
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):  # the disk, a quota or a file's size is used up
            fix = f"free space there, or set {setting} to a folder on another disk"
            raise RunError(f"the prepared rows find no room: {reason}", where=where, fix=fix) from error
        fix = f"set {setting} to a folder that can be written"
        raise ConfigError(f"cannot be written: {reason}", where=where, fix=fix) from error
    return folder


def is_sound(folder: Path) -> bool:
    """Return True if the folder holds the bytes it was sealed with; over 1 GB/s, see `_checksums` for large files."""
    try:
        seal = json.loads((folder / SEAL).read_text(encoding="utf-8"))
        return bool(seal["files"] == _checksums(folder))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _checksums(folder: Path) -> dict[str, list[int]]:
    """File name -> [size, crc32]. It guards against accidents, not against an attacker."""
    found = {}
    for path in sorted(path for path in folder.iterdir() if path.name != SEAL):
        crc, size = 0, path.stat().st_size
        # Of a large file only evenly spaced blocks are read: opening a store must not take longer than training on it.
        step = max(BLOCK_BYTES, size * BLOCK_BYTES // SAMPLED_BYTES)
        with path.open("rb") as file:
            for start in range(0, size, step):
                file.seek(start)
                crc = zlib.crc32(file.read(BLOCK_BYTES), crc)
        found[path.name] = [size, crc]
    return found


def content_digest(path: str) -> str:
    """Return a hex digest that changes whenever a byte of the rows, or a file's name in a folder, changes."""
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


DIGESTS = "digests"
WORTH_BYTES = 1 << 24  # smaller files are hashed at once
GRAIN_NS = 2_000_000_000
"""Two changes within the clock's grain leave one stamp. A file that was changed so shortly before is hashed again."""


def kept_digest(path: str, folder: str) -> str:
    """As `content_digest`; that of a large file or folder is kept below `folder` while no file's stamp changes."""
    if is_hub_name(path):
        return content_digest(path)
    stamps = _read_stamps(path)
    if sum(stamp[1] for stamp in stamps) < WORTH_BYTES:
        return content_digest(path)
    note = Path(folder) / DIGESTS / f"{fingerprint({'path': str(Path(path).absolute())})}.json"
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
    """Raise DataError where a digest of `kept_digest` from before no longer holds: the file was written to."""
    for path, digest in digests.items():
        if kept_digest(path, folder) != digest:
            fix = "start again when nothing writes to it any more"
            raise DataError("has changed while it was read", where=path, fix=fix)


LENGTHS = "lengths"

OF_PAIRS = {"joined": "longest_joined_tokens", "labels": "most_label_tokens"}
"""Key of a note of pairs -> key of their data report."""


def note_lengths(cfg: RunConfig, report: Mapping[str, Any]) -> None:
    """Keep the lengths of a data report. A note that cannot be written is left out."""
    trained = report["sources"].get("train", report)
    if trained["examples"]:
        longest = min(report["longest_tokens"], cfg.model.max_seq_len)
        note = {"longest": longest, "mean": trained["tokens"] / trained["examples"], "count": trained["examples"]}
        _note(cfg, note | {key: report[name] for key, name in OF_PAIRS.items() if name in report})


def note_blocks(cfg: RunConfig, count: int) -> None:
    """Keep how many blocks an epoch of a mixture has. A note that cannot be written is left out."""
    _note(cfg, {"longest": cfg.row_tokens, "mean": cfg.row_tokens, "count": count})


def read_lengths(cfg: RunConfig) -> dict[str, Any]:
    """Read `longest` and `mean` tokens of the rows of `cfg` after cutting, and their `count`; empty where not known."""
    path = _find_note(cfg)
    note = read_object(path) if path else {}
    is_whole = all(isinstance(note.get(key), int | float) and note[key] > 0 for key in ("longest", "mean", "count"))
    return note if is_whole else {}


def _note(cfg: RunConfig, note: dict[str, Any]) -> None:
    if path := _find_note(cfg):
        with suppress(OSError):
            write_text(path, json.dumps(note))


def _find_note(cfg: RunConfig) -> Path | None:
    data, model, terms, stamps = cfg.data, cfg.model, cfg.tuning.new_tokens.path, []
    try:
        files = [file for key, path in row_paths(cfg) if key != "data.test_path" for file in list_files(path)]
        files += [Path(path) for path in (data.template, terms) if path and path not in ("auto", "chatml")]
        for file in files:
            found = file.stat()
            stamps.append([str(file), found.st_size, found.st_mtime_ns])
    except (DataError, OSError):  # a data set of the hub, or a missing file
        return None
    rows = data.model_dump(exclude={"train_path", "val_path", "test_path", "processed_dir"})
    parts = {"files": stamps, "model": [model.name, model.revision, model.adapter, model.max_seq_len], "rows": rows}
    # Another task makes other rows of the same file.
    parts["task"] = [cfg.task.folder, cfg.task.takes_answers]
    if cfg.learns_documents:
        sources = [source.model_dump(exclude={"name"}) for source in cfg.datasets]
        parts |= {"cpt": cfg.cpt.model_dump(exclude={"train_tokens"}), "sources": sources}
    return Path(data.processed_dir) / LENGTHS / f"{fingerprint(parts)}.json"
