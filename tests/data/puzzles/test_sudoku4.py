"""The built-in puzzles on 4x4 grids: their counts, their one solution, and what the test shares with training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sftplay.errors import ConfigError, DataError
from sftplay.tasks.hrm.puzzles.folder import PuzzleFolder
from sftplay.tasks.hrm.puzzles.sampler import open_split, open_splits
from sftplay.tasks.hrm.puzzles.sudoku import find_solutions, in_order_of_digits, solved_grids


@pytest.fixture(scope="module")
def splits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PuzzleFolder]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SFTPLAY_CACHE", str(tmp_path_factory.mktemp("cache")))
        keys = {"train": "data.train_path", "test": "data.val_path"}
        return {split: open_split("builtin:sudoku4", split, key=key) for split, key in keys.items()}


def originals(folder: PuzzleFolder) -> tuple[np.ndarray, np.ndarray]:
    """Questions and answers of the first puzzle of each group, as digits."""
    only = folder.sets[0]
    first = only.group_indices[:-1]
    return only.inputs[first] - 1, only.labels[first] - 1


def test_the_counts_are_those_of_the_published_set_up(splits: dict[str, PuzzleFolder]):
    train, test = splits["train"], splits["test"]
    assert (train.facts.total_groups, test.facts.total_groups, len(test)) == (1200, 264, 264)
    assert (train.facts.vocab_size, train.facts.seq_len, train.facts.num_puzzle_identifiers) == (6, 16, 1)
    solutions = {split: {row.tobytes() for row in originals(folder)[1]} for split, folder in splits.items()}
    assert (len(solutions["train"]), len(solutions["test"])) == (200, 88)
    for folder in splits.values():
        clues = (originals(folder)[0] > 0).sum(axis=1)
        assert (clues.min(), clues.max()) == (5, 9)
        assert clues.mean() == pytest.approx(7, abs=0.2)


def test_every_puzzle_has_its_label_as_the_only_solution(splits: dict[str, PuzzleFolder]):
    solved = solved_grids()
    for folder in splits.values():
        questions, answers = folder.sets[0].inputs[:] - 1, folder.sets[0].labels[:] - 1
        fits = ((solved[:, None] == questions[None, ::7]) | (questions[None, ::7] == 0)).all(axis=2)
        assert (fits.sum(axis=0) == 1).all()
        assert np.array_equal(solved[fits.argmax(axis=0)], answers[::7])


def test_no_solution_of_the_test_is_seen_in_training_in_any_copy(splits: dict[str, PuzzleFolder]):
    seen = {row.tobytes() for row in splits["train"].sets[0].labels[:]}
    assert len(seen) == 200
    assert not seen & {row.tobytes() for row in splits["test"].sets[0].labels[:]}


def test_no_puzzle_is_shared_whatever_its_digits_are_called(splits: dict[str, PuzzleFolder]):
    forms = {s: {in_order_of_digits(puzzle) for puzzle in originals(folder)[0]} for s, folder in splits.items()}
    assert not forms["train"] & forms["test"]
    assert len({puzzle.tobytes() for puzzle in originals(splits["train"])[0]}) == 1200
    assert len({puzzle.tobytes() for puzzle in originals(splits["test"])[0]}) == 264


def test_an_unknown_builtin_is_refused_with_the_known_one():
    with pytest.raises(ConfigError, match="no built-in puzzles called 'sudoku5'") as raised:
        open_split("builtin:sudoku5", "train", key="data.train_path")
    assert (raised.value.where, raised.value.fix) == ("data.train_path", "use builtin:sudoku4")


def test_a_folder_of_both_splits_is_opened_at_the_asked_one(splits: dict[str, PuzzleFolder], tmp_path: Path):
    for split, folder in splits.items():
        (tmp_path / split).symlink_to(folder.path)
    assert len(open_split(str(tmp_path), "test", key="data.val_path")) == 264
    assert len(open_split(str(tmp_path / "train"), "test", key="data.val_path")) == len(splits["train"])


def test_a_folder_with_one_of_both_splits_is_told_which_is_missing(splits: dict[str, PuzzleFolder], tmp_path: Path):
    for there, missing in (("train", "test"), ("test", "train")):
        (tmp_path / there).mkdir()
        (tmp_path / there / there).symlink_to(splits[there].path)
        with pytest.raises(DataError, match=f"holds the split {there} and no {missing}") as raised:
            open_splits(str(tmp_path / there), None)
        assert str(tmp_path / there / missing) in raised.value.fix
    with pytest.raises(DataError, match=r"data\.val_path holds the split train and no test") as raised:
        open_splits("builtin:sudoku4", str(tmp_path / "train"))
    assert raised.value.fix == f"write {tmp_path / 'train' / 'test'} too"  # the other one holds what was learned
    train, held_out = open_splits(str(tmp_path / "train" / "train"), None)
    assert (len(train), held_out) == (len(splits["train"]), None)


def test_the_solver_tells_none_one_and_several_solutions_apart():
    one = "2...8.3...6..7..84.3.5..2.9...1.54.8.........4.27.6...3.1..7.4.72..4..6...4.1...3"
    answer = "245981376169273584837564219976125438513498627482736951391657842728349165654812793"
    several, none = "." * 81, "22" + "." * 79
    grids = np.array([[int(c) if c.isdigit() else 0 for c in text] for text in (one, several, none)], np.uint8)
    found = find_solutions(grids)
    assert found.counts[0] == 1
    assert found.counts[1] >= 2
    assert found.counts[2] == 0
    assert "".join(map(str, found.grids[found.owners == 0][0])) == answer
