"""The shape of a model of puzzles, from its config and from the puzzles, or from their kind where they are not there.

It loads neither torch nor a row of the puzzles.
"""

from __future__ import annotations

from pathlib import Path

from sftplay.config.schema.run import RunConfig
from sftplay.data.puzzles.make.find import BUILTIN, open_splits
from sftplay.plan.puzzles.shape import PuzzleModelShape, model_shape_of
from sftplay.plan.puzzles.weights import GridSize, PuzzleShape

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
