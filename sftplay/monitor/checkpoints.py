"""Which checkpoints count: those with a COMPLETE.json, written after every other file has reached the disk.

The Trainer writes the checkpoint's files.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from sftplay.atomic import read_object, write_text

MARKER = "COMPLETE.json"


def step_of(checkpoint: Path) -> int:
    """N of `checkpoint-N`; of a folder by another name, the step in its marker."""
    number = checkpoint.name.rpartition("checkpoint-")[2]
    return int(number) if number.isdigit() else int(read_marker(checkpoint)["step"])


def mark_complete(checkpoint: Path, facts: dict[str, Any]) -> None:
    """Sync every file of `checkpoint` to the disk, then write the marker.

    The marker holds each file's size and sha256, and `facts` (the run's fingerprint).
    """
    files = {}
    for path in sorted(p for p in checkpoint.rglob("*") if p.is_file() and p.name != MARKER):
        with path.open("rb") as handle:
            digest = hashlib.file_digest(handle, "sha256").hexdigest()
            os.fsync(handle.fileno())
        files[str(path.relative_to(checkpoint))] = {"bytes": path.stat().st_size, "sha256": digest}
    write_text(checkpoint / MARKER, json.dumps({"step": step_of(checkpoint), **facts, "files": files}, indent=1))
    _sync_folder(checkpoint)
    _sync_folder(checkpoint.parent)


def read_marker(checkpoint: Path) -> dict[str, Any]:
    """The marker's content; empty for a checkpoint that does not count."""
    return read_object(checkpoint / MARKER)


def find_damage(checkpoint: Path) -> str:
    """What is wrong with a checkpoint marked complete: a missing or changed file. Empty when nothing is."""
    files = read_marker(checkpoint).get("files")
    if not files:
        return f"no readable {MARKER}"
    for name, expected in files.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != expected["bytes"]:
            return f"{name} has {path.stat().st_size} bytes instead of {expected['bytes']}"
        with path.open("rb") as handle:
            if hashlib.file_digest(handle, "sha256").hexdigest() != expected["sha256"]:
                return f"{name} has changed (sha256)"
    return ""


def list_checkpoints(folder: Path) -> list[Path]:
    """All `checkpoint-N` below `folder`, oldest first, complete or not."""
    found = [p for p in folder.glob("checkpoint-*") if p.is_dir() and p.name.rsplit("-", 1)[1].isdigit()]
    return sorted(found, key=step_of)


def newest_complete(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest undamaged complete checkpoint, and a line for each newer one that was passed over."""
    passed_over: list[str] = []
    for checkpoint in reversed(list_checkpoints(folder)):
        damage = find_damage(checkpoint)
        if not damage:
            return checkpoint, passed_over
        passed_over.append(f"{checkpoint.name} is passed over: {damage}")
    return None, passed_over


def set_aside(folder: Path, *, after_step: int) -> list[str]:
    """Move checkpoints without a marker, and all after `after_step`, to `incomplete/`; their names.

    Otherwise a damaged or abandoned one would count as the newest when old ones are removed.
    """
    moved = []
    for checkpoint in list_checkpoints(folder):
        if step_of(checkpoint) > after_step or not (checkpoint / MARKER).is_file():
            target = folder / "incomplete" / checkpoint.name
            target.parent.mkdir(exist_ok=True)
            while target.exists():
                target = target.with_name(target.name + "-again")
            checkpoint.rename(target)
            moved.append(checkpoint.name)
    return moved


def rotate(folder: Path, limit: int, *, best: Path | None) -> list[str]:
    """Remove the oldest complete checkpoints beyond `limit`, never the newest nor the best; their names."""
    complete = [c for c in list_checkpoints(folder) if (c / MARKER).is_file()]
    spare = [c for c in complete[:-1] if best is None or c.resolve() != best.resolve()]
    removed = []
    for checkpoint in spare[: max(0, len(complete) - limit)]:
        (checkpoint / MARKER).unlink()  # so that an interrupted removal leaves a folder that does not count
        shutil.rmtree(checkpoint)
        removed.append(checkpoint.name)
    return removed


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
