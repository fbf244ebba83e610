"""Find the shape of the model that a config names, without weights."""

from __future__ import annotations

from pathlib import Path

from sftplay.config.schema.run import RunConfig
from sftplay.data.puzzles.find import BUILTIN, open_splits
from sftplay.errors import ConfigError
from sftplay.model.source import BUILTIN_CONFIGS
from sftplay.model.start_point import resolve_names
from sftplay.plan.puzzles import GridSize, PuzzleModelShape, PuzzleShape, model_shape_of
from sftplay.plan.shape.find import find_shape, nearest_names
from sftplay.plan.shape.model_shape import ModelShape


def known_shape(cfg: RunConfig) -> ModelShape | None:
    """The shape of the config's model; None when only the hub knows it.

    Raises:
        SftplayError: the puzzles that decide the shape of a model of puzzles are there, but not sound.
    """
    if cfg.task_mode == "hrm":
        return shape_for_puzzles(cfg)
    return find_shape(cfg.model.name, cfg.model.revision, builtin=BUILTIN_CONFIGS)


def require_shape(cfg: RunConfig) -> ModelShape:
    """The shape of the config's model.

    Raises:
        ConfigError: the shape is neither on this machine nor in the shipped table.
    """
    if shape := known_shape(cfg):
        return shape
    near = near_names(cfg.model.name)
    guess = f"did you mean {' or '.join(near)}? else " if near else ""
    fetch = "" if near else f", or `make download-model MODEL={cfg.model.name}`"
    raise ConfigError(
        f"the shape of {cfg.model.name!r} is not known here",
        where=f"{cfg.origins.get('model.name', 'model')} model.name",
        fix=f"{guess}put its config.json into a folder and name that{fetch}",
        nearest=near,
    )


def near_names(name: str) -> list[str]:
    """Up to three models that the kit knows and that `name` may have been meant to be, best first."""
    return nearest_names(name, BUILTIN_CONFIGS)


def checkpoint_bytes(cfg: RunConfig) -> int | None:
    """Bytes of one checkpoint of a config on this machine, None where the model's shape is not known here."""
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


KINDS = {
    "arc": GridSize(cells=900, words=12, identifiers=1_121_121, name="ARC, 30 x 30: 1120 tasks with 1000 copies each"),
    "maze": GridSize(cells=900, words=6, identifiers=1, name="mazes of 30 x 30"),
    "sudoku": GridSize(cells=81, words=11, identifiers=1, name="Sudoku, 9 x 9"),
}
"""What `make puzzle-data` makes, by its KIND; of ARC as many identifiers as ARC-AGI-2 has, the larger one: those of
1000 training and 120 evaluation tasks with AUG=1000, and the blank one."""


def shape_for_puzzles(cfg: RunConfig) -> PuzzleModelShape:
    """The shape of the config's model.

    Where there are no puzzles yet, their grid is assumed from the name of their folder, and the shape says so.

    Raises:
        ConfigError: there are no built-in puzzles of that name.
        DataError: the puzzles are not sound.
    """
    path = cfg.rows_path
    if not path.startswith(BUILTIN) and not Path(path).exists():
        kind = next((kind for kind in KINDS if kind in Path(path).name.lower()), "arc")
        assumed = f"{path} is not there yet: planned for {KINDS[kind].name}"
        return model_shape_of(PuzzleShape(cfg.hrm, KINDS[kind]), rows=None, assumed=assumed)
    val_path = cfg.data.val_path
    is_there = val_path is not None and (val_path.startswith(BUILTIN) or Path(val_path).exists())
    facts = open_splits(path, val_path if is_there else None)[0].facts
    across = " x ".join(map(str, facts.shape)) if facts.shape else f"{facts.seq_len} cells"
    grid = GridSize(
        cells=facts.seq_len,
        words=facts.vocab_size,
        identifiers=facts.num_puzzle_identifiers,
        name=f"{facts.kind or Path(path).name}, {across}",
    )
    return model_shape_of(PuzzleShape(cfg.hrm, grid), rows=facts.total_groups * facts.mean_puzzle_examples)
