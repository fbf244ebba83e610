"""Sudoku on 4x4 grids, made without any file: all 288 solutions, divided into 200 for training and 88 for the test."""

from __future__ import annotations

from itertools import permutations
from random import Random

import numpy as np
from numpy.typing import NDArray

from sftplay.data.puzzles.folder import Alphabet, Group
from sftplay.data.puzzles.sudoku import Grids, find_solutions, in_order_of_digits

ALPHABET = Alphabet(kind="sudoku4", symbols=" .1234", shape=(4, 4))
N_TRAIN = 200
PUZZLES = {"train": 6, "test": 3}
"""Puzzles of each solution."""

FEWEST, MOST = 5, 9
"""Clues of a puzzle."""

SEED = 0


def solved_grids() -> Grids:
    """Return all 288 solved grids, [288, 16], in the order of their digits."""
    found = find_solutions(np.zeros((1, 16), np.uint8), most=1000).grids
    return found[np.lexsort(found.T[::-1])]


def make_groups(seed: int = SEED) -> dict[str, list[Group]]:
    """Return the groups of the splits `train` and `test`.

    Training has each puzzle with all exchanges of digits that make no solution of the test: every solution of the test
    is new to a model. No puzzle of the test is one of training with its digits exchanged.
    """
    grids, generator = solved_grids(), Random(seed)
    exchanges = [np.array((0, *digits), np.uint8) for digits in permutations(range(1, 5))]
    order = sorted(range(len(grids)), key=[generator.random() for _ in grids].__getitem__)
    train, test = grids[order[:N_TRAIN]], grids[order[N_TRAIN:]]
    allowed = {grid.tobytes() for grid in train}
    groups: dict[str, list[Group]] = {"train": [], "test": []}
    known: set[bytes] = set()
    for grid in train:
        puzzles = _make_puzzles(grid, grids, n=PUZZLES["train"], generator=generator, taken=set())
        known |= {in_order_of_digits(puzzle) for puzzle in puzzles}
        fitting = [exchange for exchange in exchanges if exchange[grid].tobytes() in allowed]  # itself is the first
        labels = np.stack([exchange[grid] for exchange in fitting]) + np.uint8(1)
        for puzzle in puzzles:
            inputs = np.stack([exchange[puzzle] for exchange in fitting]) + np.uint8(1)
            groups["train"].append(Group(inputs, labels))
    for grid in test:
        puzzles = _make_puzzles(grid, grids, n=PUZZLES["test"], generator=generator, taken=known)
        groups["test"] += [Group(puzzle[None] + np.uint8(1), grid[None] + np.uint8(1)) for puzzle in puzzles]
    return groups


def _make_puzzles(
    grid: NDArray[np.uint8], grids: Grids, *, n: int, generator: Random, taken: set[bytes]
) -> list[NDArray[np.uint8]]:
    """Make `n` puzzles with this only solution, none like one of `taken`."""
    found: dict[bytes, NDArray[np.uint8]] = {}
    while len(found) < n:
        clues = FEWEST + int(generator.random() * (MOST - FEWEST + 1))
        puzzle = _remove_cells(grid, grids, clues=clues, generator=generator)
        if FEWEST <= (puzzle > 0).sum() <= MOST and in_order_of_digits(puzzle) not in taken:
            found.setdefault(puzzle.tobytes(), puzzle)
    return list(found.values())


def _remove_cells(grid: NDArray[np.uint8], grids: Grids, *, clues: int, generator: Random) -> NDArray[np.uint8]:
    """Remove cells in random order while the solution stays unique, until `clues` are left or no other can go."""
    kept = np.ones(len(grid), bool)
    for cell in sorted(range(len(grid)), key=[generator.random() for _ in grid].__getitem__):
        if kept.sum() == clues:
            break
        kept[cell] = False
        if (grids[:, kept] == grid[kept]).all(axis=1).sum() > 1:
            kept[cell] = True
    return np.where(kept, grid, 0).astype(np.uint8)
