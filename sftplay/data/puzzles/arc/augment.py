"""Copies of a task with other directions and colours. A copy's name says how to undo it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from sftplay.data.puzzles.arc.task import Grid, Pair, Task
from sftplay.data.puzzles.dihedral import INVERSE, WAYS, turned

SEPARATOR = "|||"
TRIES = 5
"""Draws for each copy that is wanted. A task with few colours may have fewer copies that differ."""


@dataclass(frozen=True)
class Change:
    """A way to turn or mirror grids, and the colour that each colour becomes. Colour 0 stays."""

    way: int = 0
    colours: tuple[int, ...] = tuple(range(10))

    def apply(self, grid: Grid) -> Grid:
        """The changed grid."""
        return np.array(self.colours, np.uint8)[turned(grid, self.way)]

    def undo(self, grid: Grid) -> Grid:
        """The grid that `apply` has changed."""
        return turned(np.argsort(self.colours).astype(np.uint8)[grid], INVERSE[self.way])

    def name(self, task: str) -> str:
        """The identifier of the task's copy; the task's own where nothing changes."""
        if self == Change():
            return task
        return SEPARATOR.join([task, f"t{self.way}", "".join(map(str, self.colours))])


def parse_name(name: str) -> tuple[str, Change]:
    """The task and the change that an identifier names."""
    task, *parts = name.split(SEPARATOR)
    if not parts:
        return task, Change()
    way, colours = parts
    return task, Change(int(way.removeprefix("t")), tuple(map(int, colours)))


def draw_changes(task: Task, n: int, *, stream: np.random.Generator) -> list[Change]:
    """Nothing, and up to `n` changes under which the task's grids all differ."""
    flat = [np.concatenate([_flat(turned(grid, way)) for grid in _grids(task.pairs)]) for way in WAYS]
    is_shape = np.concatenate([_is_shape(grid) for grid in _grids(task.pairs)])
    changes, seen = [Change()], {_digest(flat[0], is_shape, change=Change())}
    for _ in range(TRIES * n):
        if len(changes) > n:
            break
        change = Change(int(stream.integers(8)), (0, *(1 + stream.permutation(9)).tolist()))
        if (digest := _digest(flat[change.way], is_shape, change=change)) not in seen:
            seen.add(digest)
            changes.append(change)
    return changes


def canonical(pair: Pair) -> bytes:
    """The same for all pairs that a change makes of each other, and for no others."""
    return min(_in_order_of_colours(turned(pair.input, way), turned(pair.output, way)) for way in WAYS)


def _in_order_of_colours(first: Grid, second: Grid) -> bytes:
    cells = np.concatenate([first.ravel(), second.ravel()])
    names = {0: 0}
    return bytes([*first.shape, *second.shape, *(names.setdefault(int(cell), len(names)) for cell in cells)])


def _grids(pairs: tuple[Pair, ...]) -> list[Grid]:
    return [grid for pair in pairs for grid in (pair.input, pair.output)]


def _flat(grid: Grid) -> Grid:
    return np.concatenate([np.array(grid.shape, np.uint8), grid.ravel()])


def _is_shape(grid: Grid) -> np.ndarray:
    return np.arange(grid.size + 2) < 2


def _digest(flat: Grid, is_shape: np.ndarray, *, change: Change) -> bytes:
    colours = np.array(change.colours, np.uint8)
    cells = np.where(is_shape, flat, colours[np.where(is_shape, 0, flat)])
    return hashlib.blake2b(cells.tobytes(), digest_size=16).digest()
