"""Rows of a step: the same on every number of processes, none missed or doubled, and exact after a restore."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftplay.data.records import IGNORE_INDEX
from sftplay.errors import ConfigError
from sftplay.tasks.hrm.puzzles.folder import Alphabet, Group, PuzzleFolder, write_folder
from sftplay.tasks.hrm.puzzles.sampler import PuzzleBatch, TestBatches, TrainBatches

ALPHABET = Alphabet(kind="maze", symbols="?# SGo", shape=(1, 2))


def make(folder: Path, shapes: list[list[int]]) -> PuzzleFolder:
    """A split of groups, each given as the numbers of examples of its puzzles. The cells hold the example's number."""
    folder.mkdir(parents=True)
    groups, n, puzzle = [], 0, 0
    for sizes in shapes:
        count = sum(sizes)
        rows = np.array([[number % 6, number // 6 % 6] for number in range(n, n + count)], np.uint8)
        groups.append(Group(rows, np.full_like(rows, 3), sizes, list(range(puzzle + 1, puzzle + 1 + len(sizes)))))
        n, puzzle = n + count, puzzle + len(sizes)
    write_folder(folder, groups, alphabet=ALPHABET)
    return PuzzleFolder.open(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> PuzzleFolder:
    return make(tmp_path_factory.mktemp("rows") / "train", [[1, 2], [3], [1], [4, 1, 2], [2], [1, 1]] * 4)


def sample_batches(folder: PuzzleFolder, n: int, *, rank: int = 0, world: int = 1, seed: int = 5) -> list[PuzzleBatch]:
    rows = TrainBatches(folder, seed=seed, global_batch=6, rank=rank, world=world, epochs_per_pass=2)
    return [next(rows) for _ in range(n)]


@pytest.mark.parametrize("world", [2, 3])
def test_processes_together_have_exactly_the_rows_of_one(folder: PuzzleFolder, world: int):
    alone = sample_batches(folder, 40)
    parts = [sample_batches(folder, 40, rank=rank, world=world) for rank in range(world)]
    for step, whole in enumerate(alone):
        together = [parts[rank][step] for rank in range(world)]
        for name in ("rows", "inputs", "labels", "puzzle_identifiers", "mask"):
            found = np.concatenate([getattr(part, name) for part in together])
            assert np.array_equal(found, getattr(whole, name))


@given(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=6, max_size=12), st.integers(0, 2**31))
def test_a_pass_visits_each_group_once_and_takes_no_example_twice(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[list[int]], seed: int
):
    split = make(tmp_path_factory.mktemp("any") / "train", shapes)
    only = split.sets[0]
    rows = TrainBatches(split, seed=seed, global_batch=3, rank=0, world=1, epochs_per_pass=1)
    visits: Counter[int] = Counter()
    open_puzzle: dict[int, set[int]] = {}
    while True:
        batch = next(rows)
        if rows.passes:
            break
        assert len(batch.rows) == 3
        for row, puzzle in zip(batch.rows.tolist(), only.find_puzzles(batch.rows).tolist(), strict=True):
            group = int(np.searchsorted(only.group_indices, puzzle, side="right")) - 1
            assert open_puzzle.setdefault(group, {puzzle}) == {puzzle}  # one puzzle of a group
            visits[row] += 1
    assert set(visits.values()) <= {1}
    # What a pass leaves out: the rest of a puzzle that filled a batch, and the incomplete last batch.
    assert len(open_puzzle) >= len(shapes) - 2


def test_a_restored_sampler_goes_on_as_if_nothing_had_happened(folder: PuzzleFolder):
    whole = sample_batches(folder, 60)
    for at in (0, 1, 7, 8, 23, 41):
        first = TrainBatches(folder, seed=5, global_batch=6, rank=0, world=1, epochs_per_pass=2)
        for _ in range(at):
            next(first)
        state = json.loads(json.dumps(first.state()))
        second = TrainBatches(folder, seed=5, global_batch=6, rank=0, world=1, epochs_per_pass=2)
        second.restore(state)
        for expected in whole[at:]:
            assert np.array_equal(next(second).rows, expected.rows)


def test_a_state_of_other_settings_is_refused(folder: PuzzleFolder):
    state = TrainBatches(folder, seed=5, global_batch=6, rank=0, world=1).state()
    with pytest.raises(ConfigError, match="sampled with seed 5, not 6"):
        TrainBatches(folder, seed=6, global_batch=6, rank=0, world=1).restore(state)
    with pytest.raises(ConfigError, match="global_batch 6, not 8"):
        TrainBatches(folder, seed=5, global_batch=8, rank=0, world=1).restore(state)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_measurement_has_each_row_once_and_says_what_is_padding(folder: PuzzleFolder, world: int):
    shares = [TestBatches(folder, global_batch=12, rank=rank, world=world) for rank in range(world)]
    lists = [list(share) for share in shares]
    assert {len(batches) for batches in lists} == {len(shares[0])} == {-(-len(folder) // 12)}
    seen: list[int] = []
    for step in range(len(shares[0])):
        for batches in lists:
            batch = batches[step]
            assert batch.mask.shape == (12 // world,)
            assert np.array_equal(batch.rows >= 0, batch.mask)
            assert (batch.labels[~batch.mask] == IGNORE_INDEX).all()
            assert (batch.puzzle_identifiers[~batch.mask] == folder.facts.blank_identifier_id).all()
            assert (batch.puzzle_identifiers[batch.mask] > 0).all()
            assert (batch.inputs[~batch.mask] == folder.facts.pad_id).all()
            seen += batch.rows[batch.mask].tolist()
    assert seen == list(range(len(folder)))


def test_a_batch_that_cannot_be_split_or_filled_is_refused(folder: PuzzleFolder):
    with pytest.raises(ConfigError, match="cannot be split evenly over 4 processes"):
        TrainBatches(folder, seed=0, global_batch=6, rank=0, world=4)
    # The smallest puzzles of the six shapes have 1 + 3 + 1 + 1 + 2 + 1 = 9 examples, four times 36.
    with pytest.raises(ConfigError, match="37 rows are more than the 36 that a pass"):
        TrainBatches(folder, seed=0, global_batch=37, rank=0, world=1, epochs_per_pass=1)
