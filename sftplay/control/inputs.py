"""Checks the inputs of a run before a heavy library is imported."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

from sftplay.config.schema.run import RunConfig
from sftplay.data.layouts.convert import Reading, to_record
from sftplay.data.read.files import files_of
from sftplay.data.read.sources import Dialect, is_hub_name, read_rows
from sftplay.data.records import Refused
from sftplay.errors import DataError, MachineError
from sftplay.model.source import check_source, is_local
from sftplay.model.start_point import resolve_names

SAMPLED_ROWS = 32
NAMED_ROWS = 5


def needs_no_hub(cfg: RunConfig) -> bool:
    """True when the model and all data are on this machine."""
    data = (cfg.data.train_path, cfg.data.val_path, cfg.data.test_path)
    return is_local(resolve_names(cfg).model.name) and all(Path(path).exists() for path in data if path)


def check_inputs(cfg: RunConfig) -> RunConfig:
    """Refuse missing inputs; otherwise `cfg` with names of runs resolved.

    Raises:
        ConfigError: the model is not found, its name is ambiguous, or the adapter does not fit.
        DataError: a data file is missing or of an unknown kind, or none of the first training rows can be read.
        MachineError: a tracker is not installed.
    """
    cfg = resolve_names(cfg)
    where = f"{cfg.origins.get('model.name', 'model')} model.name"
    check_source(cfg.model.name, where, allow_pickle=cfg.model.allow_pickle)
    for key in ("train_path", "val_path", "test_path"):
        path = getattr(cfg.data, key)
        if path is not None and not is_hub_name(path):
            _check_file(path, f"data.{key}", cfg=cfg)
    _check_template(cfg)
    _check_trackers(cfg)
    if not is_hub_name(cfg.data.train_path):
        _check_first_rows(cfg)
    return cfg


def _check_file(path: str, key: str, *, cfg: RunConfig) -> None:
    try:
        files_of(path)
    except DataError as error:
        where = f"{cfg.origins.get(key, 'default')} {key}"
        raise DataError(f"{path}: {error.what}", where=where, fix=error.fix) from None


def _check_template(cfg: RunConfig) -> None:
    template = cfg.data.template
    if template not in ("auto", "chatml") and not Path(template).is_file():
        where = f"{cfg.origins.get('data.template', 'default')} data.template"
        raise DataError(f"there is no file {template!r}", where=where, fix="give auto, chatml or a Jinja file's path")


def _check_first_rows(cfg: RunConfig) -> None:
    """Refuse a file whose first rows are all bad, because its layout is another. With skip the full pass decides."""
    data, n_rows = cfg.data, 0
    refused: list[str] = []
    reading = Reading(format=data.format, columns=tuple(data.columns.items()), system=data.system)
    rows = read_rows(data.train_path, Dialect(encoding=data.encoding, delimiter=data.delimiter))
    for source, row in islice(rows, SAMPLED_ROWS):
        n_rows += 1
        try:
            if not isinstance(row, Refused):
                to_record(row, source, reading=reading)
                return
            refused.append(f"{source} {row.reason}")
        except DataError as error:
            refused.append(f"{source} {error.what}")
    where = f"{cfg.origins.get('data.train_path', 'default')} data.train_path"
    if not n_rows:
        raise DataError(f"{data.train_path}: has no rows", where=where, fix="name a file with at least one row")
    if data.on_bad_row == "skip":
        return
    count = "its only row cannot" if n_rows == 1 else f"none of its first {n_rows} rows can"
    reasons = "".join(f"\n  {reason}" for reason in refused[:NAMED_ROWS])
    fix = "name its layout with data.format and its columns with data.columns, or another file"
    raise DataError(f"{data.train_path}: {count} be read{reasons}", where=where, fix=fix)


def _check_trackers(cfg: RunConfig) -> None:
    backend = cfg.logging.backend
    for tracker in [backend] if isinstance(backend, str) else backend:
        if tracker != "none" and find_spec(tracker) is None:
            raise MachineError(
                f"the tracker {tracker} is not installed",
                where=f"{cfg.origins.get('logging.backend', 'default')} logging.backend",
                fix=f"{sys.executable} -m pip install {tracker}, or logging.backend=none",
            )
