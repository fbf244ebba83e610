"""Finds the solutions of many Sudoku puzzles at once.

Candidates are bits of a number for each cell. Singles are filled in until nothing changes; then a cell with the fewest
candidates is guessed, the last guesses first.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

Grids = NDArray[np.uint8]
"""[grids, cells]: 0 is a blank, else the digit."""

Nodes = tuple[NDArray[np.int64], NDArray[np.uint16]]
"""The puzzle of each search node, and its candidates."""

AT_ONCE = 1024
"""Search nodes that are looked at together."""

MOST_NODES = 200_000
"""Nodes of one puzzle, after which the search gives it up. Those of published lists took fewer than a thousand."""

BITS = np.array([number.bit_count() for number in range(1 << 9)], np.uint8)


@dataclass(frozen=True)
class Solutions:
    """What a search has found."""

    owners: NDArray[np.int64]
    """[solutions]: the puzzle that each solves."""

    grids: Grids
    """[solutions, cells]"""

    given_up: NDArray[np.bool_]
    """[puzzles]: the search was cut off."""

    @property
    def counts(self) -> NDArray[np.int64]:
        """[puzzles]: how many were found."""
        return np.bincount(self.owners, minlength=len(self.given_up))


@cache
def units_of(size: int) -> NDArray[np.int64]:
    """[units, size]: the cells of each row, column and box of a grid with `size` rows."""
    box = int(size**0.5)
    cells = np.arange(size * size).reshape(size, size)
    boxes = cells.reshape(box, box, box, box).swapaxes(1, 2).reshape(size, size)
    return np.concatenate([cells, cells.T, boxes])


@cache
def units_of_cells(size: int) -> NDArray[np.int64]:
    """[cells, 3]: the row, column and box of each cell, by their place in `units_of`."""
    units = units_of(size)
    return np.array([np.flatnonzero((units == cell).any(axis=1)) for cell in range(size * size)])


def find_solutions(puzzles: Grids, *, most: int = 2, most_nodes: int = MOST_NODES) -> Solutions:
    """At least `most` solutions of each puzzle, or all where it has fewer."""
    size = round(puzzles.shape[1] ** 0.5)
    full = (1 << size) - 1
    given = puzzles.astype(np.uint16)
    options = np.where(given > 0, np.left_shift(1, np.maximum(given, 1) - 1), full).astype(np.uint16)
    stack = [(np.arange(len(puzzles)), options)]
    counts, nodes = np.zeros(len(puzzles), np.int64), np.zeros(len(puzzles), np.int64)
    owners, grids = [np.zeros(0, np.int64)], [np.zeros((0, puzzles.shape[1]), np.uint8)]
    while stack:
        owner, options = _pop(stack)
        goes_on = (counts[owner] < most) & (nodes[owner] < most_nodes)
        owner, options = owner[goes_on], options[goes_on]
        nodes += np.bincount(owner, minlength=len(nodes))
        alive = _fill_singles(options, size)
        owner, options = owner[alive], options[alive]
        solved = (BITS[options] == 1).all(axis=1)
        counts += np.bincount(owner[solved], minlength=len(counts))
        owners.append(owner[solved])
        grids.append((np.log2(options[solved]) + 1).astype(np.uint8))
        if not solved.all():
            stack += _guess(owner[~solved], options[~solved])
    return Solutions(np.concatenate(owners), np.concatenate(grids), (nodes >= most_nodes) & (counts < most))


def _fill_singles(options: NDArray[np.uint16], size: int) -> NDArray[np.bool_]:
    """Narrow the candidates in place as far as singles go; which nodes are without a contradiction."""
    units, of_cell, full = units_of(size), units_of_cells(size), (1 << size) - 1
    alive = np.ones(len(options), bool)
    moving = np.arange(len(options))
    while len(moving):
        before = options[moving]
        single = np.where(BITS[before] == 1, before, 0)
        in_units = single[:, units]
        taken = np.bitwise_or.reduce(in_units, axis=2)
        twice_taken = (in_units.sum(axis=2) != taken).any(axis=1)
        after = np.where(single > 0, before, before & ~np.bitwise_or.reduce(taken[:, of_cell], axis=2))
        once, twice = np.zeros_like(taken), np.zeros_like(taken)
        for place in range(size):
            here = after[:, units[:, place]]
            twice |= once & here
            once |= here
        hidden = after & np.bitwise_or.reduce((once & ~twice)[:, of_cell], axis=2)
        after = np.where(hidden > 0, hidden, after)
        dead = twice_taken | (after == 0).any(axis=1) | (once != full).any(axis=1)
        alive[moving[dead]] = False
        options[moving] = after
        moving = moving[~dead & (after != before).any(axis=1)]
    return alive


def _pop(stack: list[Nodes]) -> Nodes:
    """The last nodes of the stack, up to AT_ONCE."""
    taken = [stack.pop()]
    while stack and sum(len(owner) for owner, _ in taken) < AT_ONCE:
        taken.append(stack.pop())
    owner = np.concatenate([each for each, _ in reversed(taken)])
    options = np.concatenate([each for _, each in reversed(taken)])
    if len(owner) > AT_ONCE:
        stack.append((owner[:-AT_ONCE], options[:-AT_ONCE]))
    return owner[-AT_ONCE:], options[-AT_ONCE:]


def _guess(owner: NDArray[np.int64], options: NDArray[np.uint16]) -> list[Nodes]:
    """Two nodes for each: a cell without its lowest candidate, and last, to be looked at first, with it alone."""
    bits = BITS[options]
    cell = np.where(bits > 1, bits, 255).argmin(axis=1)
    nodes = np.arange(len(options))
    lowest = options[nodes, cell] & (~options[nodes, cell] + 1)
    with_it, without = options.copy(), options.copy()
    with_it[nodes, cell] = lowest
    without[nodes, cell] &= ~lowest
    return [(owner, without), (owner, with_it)]
