"""Which checkpoints count: those with a COMPLETE.json. It is written after every other file has reached the disk.

The Trainer writes the files of a checkpoint.
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
    """N of `checkpoint-N`; for a folder with another name the step in its marker."""
    number = checkpoint.name.rpartition("checkpoint-")[2]
    return int(number) if number.isdigit() else int(read_marker(checkpoint)["step"])


def mark_complete(checkpoint: Path, facts: dict[str, Any]) -> None:
    """Sync every file of `checkpoint` to the disk, then write the marker.

    The marker holds each file's size and sha256, and `facts` (the run's fingerprint).
    """
    files = {}
    for path in sorted(each for each in checkpoint.rglob("*") if each.is_file() and each.name != MARKER):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        files[str(path.relative_to(checkpoint))] = {"bytes": path.stat().st_size, "sha256": digest}
    write_text(checkpoint / MARKER, json.dumps({"step": step_of(checkpoint), **facts, "files": files}, indent=1))
    _sync_folder(checkpoint)
    _sync_folder(checkpoint.parent)


def read_marker(checkpoint: Path) -> dict[str, Any]:
    """The content of the marker; empty for a checkpoint that does not count."""
    return read_object(checkpoint / MARKER)


def find_damage(checkpoint: Path) -> str:
    """The missing or changed file of a checkpoint that is marked complete; empty when it has no damage."""
    files = read_marker(checkpoint).get("files")
    if not files:
        return f"no readable {MARKER}"
    for name, expected in files.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != expected["bytes"]:
            return f"{name} has {path.stat().st_size} bytes instead of {expected['bytes']}"
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != expected["sha256"]:
                return f"{name} has changed (sha256)"
    return ""


def list_checkpoints(folder: Path) -> list[Path]:
    """All `checkpoint-N` in `folder`, oldest first, complete or not."""
    checkpoints = (path for path in folder.glob("checkpoint-*") if path.name.rsplit("-", 1)[1].isdigit())
    return sorted(filter(Path.is_dir, checkpoints), key=step_of)


def is_marked(checkpoint: Path) -> bool:
    """True when `checkpoint` is marked complete. Its files are not compared with the marker."""
    return (checkpoint / MARKER).is_file()


def list_marked(folder: Path) -> list[Path]:
    """The checkpoints in `folder` that are marked complete, oldest first."""
    return list(filter(is_marked, list_checkpoints(folder)))


def newest_complete(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest complete checkpoint without damage, and a line for each newer one that is passed over."""
    passed_over: list[str] = []
    for checkpoint in reversed(list_checkpoints(folder)):
        damage = find_damage(checkpoint)
        if not damage:
            return checkpoint, passed_over
        passed_over.append(f"{checkpoint.name} is passed over: {damage}")
    return None, passed_over


def set_aside(folder: Path, *, after_step: int) -> list[str]:
    """Move checkpoints without a marker, and all after `after_step`, to `incomplete/`. Return their names.

    Otherwise a damaged or abandoned one would count as the newest when old ones are removed.
    """
    moved = []
    for checkpoint in list_checkpoints(folder):
        if step_of(checkpoint) > after_step or not is_marked(checkpoint):
            target = folder / "incomplete" / checkpoint.name
            target.parent.mkdir(exist_ok=True)
            while target.exists():
                target = target.with_name(target.name + "-again")
            checkpoint.rename(target)
            moved.append(checkpoint.name)
    return moved


def rotate(folder: Path, limit: int, *, best: Path | None) -> list[str]:
    """Remove the oldest complete checkpoints beyond `limit`, never the newest or the best. Return their names."""
    complete = list_marked(folder)
    removable = [each for each in complete[:-1] if best is None or each.resolve() != best.resolve()]
    removed = []
    for checkpoint in removable[: max(0, len(complete) - limit)]:
        (checkpoint / MARKER).unlink()  # what an interrupted removal leaves does not count
        shutil.rmtree(checkpoint)
        removed.append(checkpoint.name)
    return removed


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
