"""Folders of the cache with their keys, and the lengths of rows that were tokenized before."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from sftplay.atomic import locked, read_object, resumed_folder, whole_folder, write_text
from sftplay.config.data import row_paths
from sftplay.config.run import RunConfig
from sftplay.data.files import list_files
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

    One process makes it while others wait. A `write_files` that fails or is killed leaves no such folder; with
    `resumes` it gets what a killed one has left. `setting` is what sets the place, for errors.

    Raises:
        ConfigError: nothing can be written there.
        RunError: there is no room for it.
    """
    if is_sound(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(get_lock_path(folder)):
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


def get_lock_path(folder: Path) -> Path:
    """Return the path of the lock that a process holds while it makes a folder."""
    return folder.with_name(f"{folder.name}.lock")


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


FOLDER = "lengths"


def note_lengths(cfg: RunConfig, report: Mapping[str, Any]) -> None:
    """Keep the lengths of a data report. A note that cannot be written is left out."""
    trained = report["sources"].get("train", report)
    if trained["examples"]:
        longest = min(report["longest_tokens"], cfg.model.max_seq_len)
        _note(cfg, {"longest": longest, "mean": trained["tokens"] / trained["examples"], "count": trained["examples"]})


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
    data, model, stamps = cfg.data, cfg.model, []
    try:
        for files in [list_files(path) for key, path in row_paths(cfg) if key != "data.test_path"]:
            stamps.append([[str(file), (found := file.stat()).st_size, found.st_mtime_ns] for file in files])
    except (DataError, OSError):  # a data set of the hub, or a missing file
        return None
    rows = data.model_dump(exclude={"train_path", "val_path", "test_path", "processed_dir"})
    parts = {"files": stamps, "model": [model.name, model.revision, model.adapter, model.max_seq_len], "rows": rows}
    if cfg.learns_documents:
        sources = [source.model_dump(exclude={"name"}) for source in cfg.datasets]
        parts |= {"cpt": cfg.cpt.model_dump(exclude={"train_tokens"}), "sources": sources}
    return Path(data.processed_dir) / FOLDER / f"{fingerprint(parts)}.json"
