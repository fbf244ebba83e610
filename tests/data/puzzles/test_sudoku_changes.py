"""Changes of a Sudoku: undone exactly, keeping its rules, and found out where a puzzle is a copy of another."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftplay.tasks.hrm.puzzles.sudoku import (
    Changes,
    compute_grid_keys,
    find_solutions,
    is_copy,
    list_units,
    sample_changes,
)

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data" / "sudoku" / "puzzles.jsonl"

QUESTION = "..3.2.6..9..3.5..1..18.64....81.29..7.......8..67.82....26.95..8..2.3..9..5.1.3.."
ANSWER = "483921657967345821251876493548132976729564138136798245372689514814253769695417382"


def cells(text: str) -> np.ndarray:
    return np.array([0 if cell == "." else int(cell) for cell in text], np.uint8)


def stream(seed: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(seed))


def test_ten_thousand_changes_keep_the_rules_and_all_differ():
    originals = np.tile(np.stack([cells(QUESTION), cells(ANSWER)]), (10_000, 1))
    # Question and answer of a pair have one change.
    sampled = sample_changes(10_000, stream())
    changes = Changes(np.repeat(sampled.digits, 2, axis=0), np.repeat(sampled.cells, 2, axis=0))
    changed = changes.apply(originals)
    # Nothing but a permutation of cells and of digits: as many clues, and the answer solves its question.
    questions, answers = changed[::2], changed[1::2]
    assert ((questions > 0).sum(axis=1) == 32).all()
    assert ((questions == 0) | (questions == answers)).all()
    assert (np.sort(answers[:, list_units(9)], axis=2) == np.arange(1, 10)).all()
    assert len({row.tobytes() for row in answers}) == 10_000


@given(st.integers(0, 2**32))
def test_all_copies_of_a_grid_have_its_key_and_are_known_as_copies(seed: int):
    pair = np.stack([cells(QUESTION), cells(ANSWER)])
    changes = sample_changes(1, stream(seed))
    copies = Changes(changes.digits.repeat(2, axis=0), changes.cells.repeat(2, axis=0)).apply(pair)
    assert np.array_equal(compute_grid_keys(copies), compute_grid_keys(pair))
    assert is_copy(pair[0], copies[0])
    assert is_copy(copies[0], pair[0])
    other = copies[0].copy()
    clue = int(np.flatnonzero(other)[seed % 32])
    other[clue] = 0
    assert not is_copy(pair[0], other)
    other[clue] = copies[0][clue] % 9 + 1
    assert not is_copy(pair[0], other)


def test_a_grid_with_two_rows_of_different_bands_exchanged_is_no_copy():
    question = cells(QUESTION).reshape(9, 9)
    moved = question[[3, 1, 2, 0, 4, 5, 6, 7, 8]].ravel()
    assert not is_copy(cells(QUESTION), moved)


def test_given_up_puzzles_are_told_from_those_without_a_solution():
    # Norvig's puzzle without a solution takes his program 24 minutes (norvig.com/sudoku.html).
    long = cells(".....5.8....6.1.43..........1.5........1.6...3.......553.....61........4.........")
    found = find_solutions(long[None], most_nodes=2000)
    assert found.given_up.tolist() == [True]
    assert found.counts.tolist() == [0]


@pytest.mark.skipif(not SHARED.is_file(), reason="needs ../shared/data/sudoku")
def test_the_real_puzzles_have_their_published_solutions_and_are_no_copies_of_each_other():
    rows = [json.loads(line) for line in SHARED.read_text().splitlines()]
    assert len(rows) == 147
    questions, answers = (np.stack([cells(row[name]) for row in rows]) for name in ("puzzle", "solution"))
    found = find_solutions(questions)
    assert (found.counts == 1).all()
    assert np.array_equal(found.grids[np.argsort(found.owners)], answers)
    assert len(set(compute_grid_keys(questions).tolist())) == len(set(compute_grid_keys(answers).tolist())) == 147
