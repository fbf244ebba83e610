"""Keeps how long the rows of a data set are, so that a plan can ask before a tokenizer is opened.

A note lies beside the prepared rows. It is found by the files' sizes and times and by the settings that decide lengths;
where one of them has changed nothing is known.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from sftplay.atomic import read_object, write_text
from sftplay.config.schema.run import RunConfig
from sftplay.data.cache import fingerprint
from sftplay.data.read.files import files_of
from sftplay.errors import DataError

FOLDER = "lengths"


def note_lengths(cfg: RunConfig, report: Mapping[str, Any]) -> None:
    """Keep what a data report says of lengths. A note that cannot be written is left out."""
    path, trained = _path(cfg), report["sources"].get("train", report)
    if path and trained["examples"]:
        longest = min(report["longest_tokens"], cfg.model.max_seq_len)
        note = {"longest": longest, "mean": trained["tokens"] / trained["examples"], "count": trained["examples"]}
        with suppress(OSError):
            write_text(path, json.dumps(note))


def read_lengths(cfg: RunConfig) -> dict[str, Any]:
    """`longest` and `mean` tokens of the rows of `cfg` after cutting, and their `count`; empty where not known."""
    path = _path(cfg)
    note = read_object(path) if path else {}
    is_whole = all(isinstance(note.get(key), int | float) and note[key] > 0 for key in ("longest", "mean", "count"))
    return note if is_whole else {}


def _path(cfg: RunConfig) -> Path | None:
    data, model = cfg.data, cfg.model
    try:
        stamps = [_stamp(path) for path in (data.train_path, data.val_path) if path]
    except (DataError, OSError):  # a data set of the hub, or a missing file
        return None
    rows = data.model_dump(exclude={"train_path", "val_path", "test_path", "processed_dir"})
    parts = {"files": stamps, "model": [model.name, model.revision, model.adapter, model.max_seq_len], "rows": rows}
    return Path(data.processed_dir) / FOLDER / f"{fingerprint(parts)}.json"


def _stamp(path: str) -> list[list[Any]]:
    return [[str(file), (status := file.stat()).st_size, status.st_mtime_ns] for file in files_of(path)]
