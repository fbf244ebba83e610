"""A split of puzzles on disk: what is written is read again, and whatever is wrong is named with its file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sftplay.errors import DataError
from sftplay.tasks.hrm.puzzles.folder import Alphabet, Group, PuzzleFolder, write_folder

ALPHABET = Alphabet(kind="sudoku4", symbols=" .1234", shape=(2, 2))


def written(folder: Path) -> Path:
    """Two groups: puzzles of 1 and 2 examples, and one of 1."""
    folder.mkdir(parents=True)
    rows = np.array([[1, 2, 3, 4], [1, 1, 3, 4], [2, 2, 2, 2], [5, 5, 5, 5]], np.uint8)
    groups = [Group(rows[:3], rows[:3], [1, 2], [0, 2]), Group(rows[3:], rows[3:], [1], [1])]
    write_folder(folder, groups, alphabet=ALPHABET)
    return folder


def test_what_was_written_is_read_again_with_its_counts(tmp_path: Path):
    folder = PuzzleFolder.open(written(tmp_path / "train"))
    facts, only = folder.facts, folder.sets[0]
    assert (facts.vocab_size, facts.seq_len, facts.num_puzzle_identifiers, facts.total_groups) == (6, 4, 3, 2)
    assert facts.mean_puzzle_examples == pytest.approx(4 / 3)
    assert only.inputs.tolist()[1] == [1, 1, 3, 4]
    assert (only.puzzle_indices.tolist(), only.group_indices.tolist()) == ([0, 1, 3, 4], [0, 2, 3])
    assert only.find_puzzles(np.arange(4)).tolist() == [0, 1, 1, 2]
    assert isinstance(only.inputs, np.memmap)
    # floor(epochs * total_groups * mean_puzzle_examples / global_batch): 10 * 2 * 4/3 / 4 = 6.67
    assert folder.total_steps(10, global_batch=4) == 6


def change(name: str, edit: Callable[[np.ndarray], np.ndarray]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / f"all__{name}.npy"
        np.save(path, edit(np.load(path)))

    return apply


def say(**values: object) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "dataset.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return apply


FAULTS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "no facts": (lambda f: (f / "dataset.json").unlink(), "train", "holds no dataset.json"),
    "no json": (lambda f: (f / "dataset.json").write_text("{"), "dataset.json", "holds no JSON object"),
    "facts without a key": (lambda f: (f / "dataset.json").write_text("{}"), "dataset.json", "pad_id is missing"),
    "a size that is a word": (say(vocab_size="six"), "dataset.json", "vocab_size is 'six'"),
    "sets that are no list": (say(sets="all"), "dataset.json", "sets is 'all'"),
    "a blank identifier outside": (say(blank_identifier_id=3), "dataset.json", "outside 0 to 2"),
    "another number of groups": (say(total_groups=7), "dataset.json", "total_groups is 7, but the sets hold 2"),
    "an unknown set": (say(sets=["most"]), "most__inputs.npy", "is missing"),
    "a smaller vocabulary": (say(vocab_size=5), "all__inputs.npy", "example 3 holds the token 5"),
    "a missing array": (lambda f: (f / "all__labels.npy").unlink(), "all__labels.npy", "is missing"),
    "no array": (lambda f: (f / "all__labels.npy").write_bytes(b"x" * 9), "all__labels.npy", "cannot be read"),
    "cut off": (lambda f: (p := f / "all__labels.npy").write_bytes(p.read_bytes()[:-4]), "all__labels.npy", "read"),
    "fractions": (change("labels", lambda a: a / 2), "all__labels.npy", "no whole numbers"),
    "objects": (change("labels", lambda a: a.astype(object)), "all__labels.npy", "cannot be read"),
    "other cells": (change("inputs", lambda a: a[:, :3]), "all__inputs.npy", "has the shape [4, 3], not [4, 4]"),
    "fewer labels": (change("labels", lambda a: a[:3]), "all__labels.npy", "has the shape [3, 4], not [4, 4]"),
    "no example": (change("inputs", lambda a: a[:0]), "all__inputs.npy", "is empty"),
    "negative tokens": (change("inputs", lambda a: a.astype(np.int16) - 2), "all__inputs.npy", "the token -1"),
    "offsets back": (change("puzzle_indices", lambda a: a[[0, 2, 1, 3]]), "all__puzzle_indices.npy", "grow at 2"),
    "offsets short": (change("puzzle_indices", lambda a: a[:-1]), "all__puzzle_indices.npy", "shape [3], not [4]"),
    "an offset beyond": (change("group_indices", lambda a: a + 1), "all__group_indices.npy", "goes from 1 to 4"),
    "an empty group": (change("group_indices", lambda a: np.array([0, 0, 2, 3])), "all__group_indices.npy", "at 1"),
    "an identifier beyond": (change("puzzle_identifiers", lambda a: a + 1), "all__puzzle_identifiers.npy", "0 to 2"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_folder_that_contradicts_itself_is_refused_with_the_file(tmp_path: Path, fault: str):
    spoil, file, words = FAULTS[fault]
    folder = written(tmp_path / "train")
    spoil(folder)
    with pytest.raises(DataError) as raised:
        PuzzleFolder.open(folder)
    assert raised.value.where.endswith(file)
    assert words in raised.value.what
    assert "make puzzle-data" in raised.value.fix
