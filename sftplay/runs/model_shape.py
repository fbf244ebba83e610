"""Find the shape of the model that a config names, without weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError
from sftplay.model.source import BUILTIN_CONFIGS
from sftplay.model.start_point import resolve_names
from sftplay.plan.shape.find import find_shape, nearest_models, read_table

if TYPE_CHECKING:
    from sftplay.plan.shape.model_shape import ModelShape


def known_shape(cfg: RunConfig) -> ModelShape | None:
    """Return the shape of the config's model; None when only the hub knows it. Raise SftplayError where the puzzles
    that decide the shape of a model of puzzles are there, but not sound.
    """
    if not cfg.task.reads_text:
        from sftplay.plan.sizing.task_sizing import find_sizing

        return find_sizing(cfg).known_shape(cfg)
    return find_shape(cfg.model.name, cfg.model.revision, builtin=BUILTIN_CONFIGS)


def is_known(cfg: RunConfig) -> bool:
    """Return whether the shape of the config's model is known here; a name of the shipped table is not read for it."""
    name = cfg.model.name
    return name in BUILTIN_CONFIGS or name in read_table() or known_shape(cfg) is not None


def require_shape(cfg: RunConfig) -> ModelShape:
    """Return the shape of the config's model. Raise ConfigError where the shape is neither on this machine nor in the
    shipped table.
    """
    if shape := known_shape(cfg):
        return shape
    near = near_names(cfg.model.name)
    guess = f"did you mean {' or '.join(near)}? else " if near else ""
    fetch = "" if near else f", or `make download-model MODEL={cfg.model.name}`"
    what, where = f"the shape of {cfg.model.name!r} is not known here", cfg.origins.get("model.name", "model")
    fix = f"{guess}put its config.json into a folder and name that{fetch}"
    raise ConfigError(what, where=f"{where} model.name", fix=fix, nearest=near)


def near_names(name: str) -> list[str]:
    """Return up to three models that the kit knows and that `name` may have been meant to be, best first."""
    return nearest_models(name, BUILTIN_CONFIGS)


def checkpoint_bytes(cfg: RunConfig) -> int | None:
    """Return the bytes of one checkpoint of a config on this machine, None where its shape is not known here."""
    from sftplay.machine.probe import probe
    from sftplay.plan.report.task_report import find_report
    from sftplay.plan.sizing.size_run import size_run

    cfg = resolve_names(cfg)
    shape = known_shape(cfg)
    if shape is None:
        return None
    sized = size_run(cfg, probe(), shape=shape)
    assert sized.forecast is not None
    return find_report(cfg).workload(sized.cfg, sized.forecast).checkpoint_bytes
