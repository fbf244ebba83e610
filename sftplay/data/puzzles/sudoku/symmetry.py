"""Changes of a Sudoku that keep its rules, the way back, and whether one puzzle is such a copy of another.

A change renames the digits, may transpose the grid, and exchanges bands, rows within bands, stacks, and columns within
stacks.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations, product

import numpy as np
from numpy.typing import NDArray

from sftplay.data.puzzles.sudoku.solver import Grids

Marks = NDArray[np.uint64]

ROUNDS = 4
"""How often the mark of a cell takes in those of its row, column, box and digit."""

GRIDS_AT_ONCE = 8192


@dataclass(frozen=True)
class Changes:
    """One change for each grid."""

    digits: NDArray[np.uint8]
    """[grids, 10]: what each digit becomes; a blank stays one."""

    cells: NDArray[np.int64]
    """[grids, 81]: the cell from which each new cell is taken."""

    def apply(self, grids: Grids) -> Grids:
        """The changed grids."""
        return np.take_along_axis(self.digits, np.take_along_axis(grids, self.cells, axis=1).astype(np.int64), axis=1)

    def undo(self) -> Changes:
        """The changes that lead back: those of the cells and of the digits do not depend on each other."""
        return Changes(np.argsort(self.digits, axis=1).astype(np.uint8), np.argsort(self.cells, axis=1))


def draw_changes(n: int, stream: np.random.Generator) -> Changes:
    """`n` changes, each equally likely."""
    digits = np.concatenate([np.zeros((n, 1), np.int64), 1 + _shuffled(n, 9, stream=stream)], axis=1)
    rows, columns = _lines(n, stream), _lines(n, stream)
    cells = (rows[:, :, None] * 9 + columns[:, None, :]).reshape(n, 81)
    is_transposed = stream.random(n) < 0.5
    cells[is_transposed] = cells[is_transposed] % 9 * 9 + cells[is_transposed] // 9
    return Changes(digits.astype(np.uint8), cells)


def _lines(n: int, stream: np.random.Generator) -> NDArray[np.int64]:
    """[n, 9]: orders of the rows (or columns) in which those of a band stay together."""
    bands = _shuffled(n, 3, stream=stream)
    within = _shuffled(3 * n, 3, stream=stream).reshape(n, 3, 3)
    return (bands[:, :, None] * 3 + within).reshape(n, 9)


def _shuffled(n: int, size: int, *, stream: np.random.Generator) -> NDArray[np.int64]:
    return stream.permuted(np.tile(np.arange(size), (n, 1)), axis=1)


def keys_of(grids: Grids) -> Marks:
    """[grids]: a number that all copies of a grid share. Few other grids have the same."""
    parts = [_mix(cell_marks(grids[at : at + GRIDS_AT_ONCE])).sum(axis=(1, 2)) for at in range(0, len(grids), GRIDS_AT_ONCE)]
    return np.concatenate(parts) if parts else np.zeros(0, np.uint64)


def cell_marks(grids: Grids) -> Marks:
    """[grids, 9, 9]: numbers of the cells that move with them under any change (colour refinement)."""
    found = grids.reshape(-1, 9, 9)
    marks = _mix((found > 0).astype(np.uint64))
    is_solved = (found > 0).all(axis=(1, 2))
    if is_solved.any():  # all cells of a solved grid have the same surroundings
        lines = _cycle_marks(found[is_solved])[:, :, None]
        across = _cycle_marks(found[is_solved].swapaxes(1, 2))[:, None, :]
        marks[is_solved] += _mix(lines) + _mix(across)
    for _ in range(ROUNDS):
        mixed = _mix(marks + np.uint64(1))
        digits = np.zeros_like(marks)
        for digit in range(10):
            is_here = found == digit
            digits += is_here * np.where(is_here, mixed, 0).sum(axis=(1, 2), keepdims=True, dtype=np.uint64)
        boxes = mixed.reshape(-1, 3, 3, 3, 3).sum(axis=(2, 4))
        in_boxes = np.repeat(np.repeat(boxes, 3, axis=1), 3, axis=2)
        # Rows and columns are taken in alike, because a grid may be transposed.
        across = _mix(_line_marks(mixed)) + _mix(_line_marks(mixed.swapaxes(1, 2)).swapaxes(1, 2))
        marks = _mix(marks + _mix(digits) * np.uint64(3) + _mix(in_boxes) * np.uint64(5) + across * np.uint64(7))
    return marks


def _cycle_marks(solved: NDArray[np.uint8]) -> Marks:
    """[grids, 9]: of each row, the cycles of the exchanges of digits that make the other two rows of its band of it."""
    bands = (solved - 1).reshape(-1, 3, 9)
    cycles = np.zeros((len(bands), 3), np.uint64)
    for first, second in ((0, 1), (0, 2), (1, 2)):
        becomes = np.take_along_axis(bands[:, second], np.argsort(bands[:, first], axis=1), axis=1).astype(np.int64)
        at, length = becomes, np.ones(becomes.shape, np.uint64)
        for _ in range(8):  # no cycle of nine digits is longer
            is_home = at == np.arange(9)
            length += ~is_home
            at = np.where(is_home, at, np.take_along_axis(becomes, at, axis=1))
        mark = _mix(_mix(length).sum(axis=1))
        cycles[:, first] += mark
        cycles[:, second] += mark
    return cycles.reshape(-1, 9)


def _line_marks(mixed: Marks) -> Marks:
    """[grids, 9, 1]: of each row, together with the rows of its band."""
    rows = mixed.sum(axis=2)
    bands = np.repeat(_mix(rows).reshape(-1, 3, 3).sum(axis=2), 3, axis=1)
    return _mix(rows * np.uint64(11) + _mix(bands))[:, :, None]


def _mix(numbers: Marks) -> Marks:
    """The last step of splitmix64 (Steele et al. 2014): each bit of the result depends on all bits."""
    numbers = numbers + np.uint64(0x9E3779B97F4A7C15)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def is_copy(one: NDArray[np.uint8], other: NDArray[np.uint8]) -> bool:
    """Whether a change makes the one grid of the other. All changes that the marks of the cells allow are tried."""
    target, goal = cell_marks(other[None])[0], other.reshape(9, 9)
    for grid in (one.reshape(9, 9), one.reshape(9, 9).T):
        marks = cell_marks(np.ascontiguousarray(grid).reshape(1, 81))[0]
        columns = ORDERS[(np.sort(marks, axis=0)[:, ORDERS] == np.sort(target, axis=0)[:, None]).all(axis=(0, 2))]
        for rows in ORDERS[(np.sort(marks, axis=1)[ORDERS] == np.sort(target, axis=1)).all(axis=(1, 2))]:
            fits = (marks[rows][:, columns] == target[:, None]).all(axis=(0, 2))
            if any(_in_order(grid[rows][:, order]) == _in_order(goal) for order in columns[fits]):
                return True
    return False


def _in_order(grid: NDArray[np.uint8]) -> list[int]:
    """The grid with its digits renamed in the order in which they come."""
    names = {0: 0}
    return [names.setdefault(digit, len(names)) for digit in grid.ravel().tolist()]


def _all_orders() -> NDArray[np.int64]:
    threes = list(permutations(range(3)))
    return np.array(
        [
            [3 * band + line for band, lines in zip(bands, within, strict=True) for line in lines]
            for bands in threes
            for within in product(threes, repeat=3)
        ]
    )


ORDERS = _all_orders()
"""[1296, 9]: all orders of the rows in which those of a band stay together."""
