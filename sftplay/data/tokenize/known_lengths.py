"""Keep the lengths of the rows of a data set, so that a plan can read them before a tokenizer is opened.

A note lies next to the prepared rows. Its key is the files' sizes and times and the settings that decide lengths;
where one of them has changed nothing is known.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from sftplay.atomic import read_object, write_text
from sftplay.config.data import row_paths
from sftplay.config.run import RunConfig
from sftplay.data.cache import fingerprint
from sftplay.data.read.files import list_files
from sftplay.errors import DataError

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
        parts |= {"cpt": cfg.cpt.model_dump(exclude={"streaming", "train_tokens"}), "sources": sources}
    return Path(data.processed_dir) / FOLDER / f"{fingerprint(parts)}.json"
