"""What a verb can see to be missing before it imports a heavy library."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from sftplay.config.schema import RunConfig
from sftplay.data.sources import existing_file, is_hub_name
from sftplay.errors import DataError, MachineError
from sftplay.model.source import check_source, is_local


def needs_no_hub(cfg: RunConfig) -> bool:
    """True when model and data all lie on this machine."""
    data = (cfg.data.train_path, cfg.data.val_path, cfg.data.test_path)
    return is_local(cfg.model.name) and all(Path(path).exists() for path in data if path)


def check_inputs(cfg: RunConfig) -> None:
    """Refuse what can be seen to be missing before a heavy library is imported.

    Raises:
        ConfigError: the model's name leads nowhere.
        DataError: a data file is missing or of an unknown kind.
        MachineError: a tracker is not installed.
    """
    check_source(cfg.model.name, f"{cfg.origins.get('model.name', 'model')} model.name")
    for key in ("train_path", "val_path", "test_path"):
        path = getattr(cfg.data, key)
        if path is not None and not is_hub_name(path):
            _check_file(path, f"data.{key}", cfg)
    _check_trackers(cfg)


def _check_file(path: str, key: str, cfg: RunConfig) -> None:
    try:
        existing_file(path)
    except DataError as error:
        where = f"{cfg.origins.get(key, 'default')} {key}"
        raise DataError(f"{path}: {error.what}", where=where, fix=error.fix) from None


def _check_trackers(cfg: RunConfig) -> None:
    backend = cfg.logging.backend
    for tracker in [backend] if isinstance(backend, str) else backend:
        if tracker != "none" and find_spec(tracker) is None:
            raise MachineError(
                f"the tracker {tracker} is not installed",
                where=f"{cfg.origins.get('logging.backend', 'default')} logging.backend",
                fix=f"{sys.executable} -m pip install {tracker}, or logging.backend=none",
            )
