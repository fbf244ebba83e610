"""Which checkpoints count: those with a COMPLETE.json. It is written after every other file has reached the disk.

The Trainer writes the files of a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sftplay.atomic import write_text

MARKER = "COMPLETE.json"

NUMBERED = re.compile(r"checkpoint-(0|[1-9][0-9]{0,14})")
"""How the Trainer names its checkpoints. Other digits than ASCII's, and steps that no run reaches, are no numbers."""

TOGETHER = ("rows_sha256", "rows", "kit", "data_files", "held_out_sha256", "template_sha256", "tokenizer_sha256")
"""Fields of a marker that stand together or not at all."""


class MarkedFile(BaseModel):
    model_config = ConfigDict(strict=True)

    bytes: int
    sha256: str


class Marker(BaseModel):
    """What `mark_complete` writes, so that nothing else is taken for it. Older runs wrote fewer fields."""

    model_config = ConfigDict(strict=True)

    step: Annotated[int, Field(ge=0)]
    files: dict[str, MarkedFile] = {}
    counters: dict[str, int] = {}
    sources: dict[str, dict[str, int | float | None]] = {}
    world_size: Annotated[int, Field(ge=1)] = 1
    order_hash: str = ""
    config: dict[str, Any] = {}
    weights: dict[str, str | None] = {}
    kit: str = ""
    rows: int = 0
    rows_sha256: str = ""
    held_out_sha256: str | None = None
    template_sha256: str | None = None
    tokenizer_sha256: str | None = None
    data_files: dict[str, str | None] = {}


def read_step(checkpoint: Path) -> int:
    """N of `checkpoint-N`; for a folder with another name the step in its marker."""
    match = NUMBERED.fullmatch(checkpoint.name)
    return int(match[1]) if match else int(read_marker(checkpoint)["step"])


def mark_complete(checkpoint: Path, facts: dict[str, Any]) -> None:
    """Sync every file to the disk, then write the marker: each file's size and sha256, and the run's `facts`."""
    files = {}
    for path in sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.name != MARKER):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        files[str(path.relative_to(checkpoint))] = {"bytes": path.stat().st_size, "sha256": digest}
    write_text(checkpoint / MARKER, json.dumps({"step": read_step(checkpoint), **facts, "files": files}, indent=1))
    for folder in (checkpoint, checkpoint.parent):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def read_marker(checkpoint: Path) -> dict[str, Any]:
    """The content of the marker; empty for a checkpoint that does not count."""
    return examine_marker(checkpoint)[0]


def examine_marker(checkpoint: Path) -> tuple[dict[str, Any], str]:
    """The marker's content, empty where anything in it is odd; and what that is."""
    try:
        content = json.loads((checkpoint / MARKER).read_text(encoding="utf-8"))
        Marker.model_validate(content)
    except ValidationError as error:
        place = error.errors(include_url=False)[0]["loc"]
        return {}, f"{MARKER} has an odd {place[0]!r}" if place else f"no readable {MARKER}"
    except (OSError, ValueError, RecursionError):
        return {}, f"no readable {MARKER}"
    lacking = [name for name in TOGETHER if name not in content]
    if 0 < len(lacking) < len(TOGETHER) and "rows_sha256" not in lacking:
        return {}, f"{MARKER} lacks {lacking[0]!r}"
    return content, ""


def find_damage(checkpoint: Path) -> str:
    """What is wrong with a checkpoint that is marked complete, such as a changed file; empty when it has no damage."""
    marker, problem = examine_marker(checkpoint)
    if problem or not marker.get("files"):
        return problem or f"no readable {MARKER}"
    if marker["step"] != read_step(checkpoint):
        return f"{MARKER} is of step {marker['step']}"
    for name, expected in marker["files"].items():
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
    found = [p for p in folder.glob("checkpoint-*") if p.is_dir() and NUMBERED.fullmatch(p.name)]
    return sorted(found, key=read_step)


def is_marked(checkpoint: Path) -> bool:
    """True when `checkpoint` is marked complete. Its files are not compared with the marker."""
    return (checkpoint / MARKER).is_file()


def list_marked(folder: Path) -> list[Path]:
    """The checkpoints in `folder` that are marked complete, oldest first."""
    return list(filter(is_marked, list_checkpoints(folder)))


def newest_complete(folder: Path, check: Callable[[Path], str] = lambda _: "") -> tuple[Path | None, list[str]]:
    """The newest undamaged complete checkpoint that `check` has nothing against, and a line for each skipped folder."""
    numbered = list_checkpoints(folder)
    strange = sorted(p.name for p in folder.glob("checkpoint-*") if p.is_dir() and p not in numbered)
    skipped = [f"skipping {name!r}: its name ends with no number of steps" for name in strange]
    for checkpoint in reversed(numbered):
        damage = find_damage(checkpoint) or check(checkpoint)
        if not damage:
            return checkpoint, skipped
        skipped.append(f"skipping {checkpoint.name}: {damage}")
    return None, skipped


def set_aside(folder: Path, *, after_step: int) -> list[str]:
    """Move checkpoints without a marker, and all after `after_step`, to `incomplete/`. Return their names.

    Otherwise a damaged or abandoned one would count as the newest when old ones are removed.
    """
    moved = []
    for checkpoint in list_checkpoints(folder):
        if read_step(checkpoint) > after_step or not is_marked(checkpoint):
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
    removable = [path for path in complete[:-1] if best is None or path.resolve() != best.resolve()]
    removed = []
    for checkpoint in removable[: max(0, len(complete) - limit)]:
        (checkpoint / MARKER).unlink()  # what an interrupted removal leaves does not count
        shutil.rmtree(checkpoint)
        removed.append(checkpoint.name)
    return removed
