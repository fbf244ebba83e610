"""Puzzles as people write them: what is read is what was written; a bad grid is refused with line and remedy."""

from __future__ import annotations

import numpy as np
import pytest

from sftplay.errors import DataError
from sftplay.tasks.hrm.puzzles.sudoku import SMALL_ALPHABET, GridText, Sudoku

SMALL = GridText("sudoku4", SMALL_ALPHABET.symbols, 4, 0)
LARGE = GridText("sudoku", Sudoku.alphabet.symbols, 9, 0)
GRID = "1.34\n..12\n21.3\n4321"
TOKENS = [2, 1, 4, 5, 1, 1, 2, 3, 3, 2, 1, 4, 5, 4, 3, 2]


def read(text: str) -> list[int]:
    return SMALL.read(text, cells=16, where="puzzle.txt").tolist()


def test_a_grid_is_read_by_rows_or_in_one_line_and_written_again():
    assert read(GRID) == read(GRID + "\n\n") == read(GRID.replace("\n", "")) == read(GRID.replace(".", "0")) == TOKENS
    apart = GRID.replace("", " ").replace("\n", "\n\n")  # "1 . 3 4", and empty lines between
    assert read(apart) == read(GRID.replace("\n", " ")) == TOKENS
    assert SMALL.write(np.array(TOKENS)) == GRID
    assert SMALL.write(np.array([-1] * 16)) == "····\n····\n····\n····"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "puzzle.txt: is empty"),
        ("1.34\n..12\n21.3", "puzzle.txt:3: has 3 lines"),
        (f"{GRID}\n1234", "puzzle.txt:5: has 5 lines"),
        ("1.34\n..1\n21.3\n4321", "puzzle.txt:2: has 3 cells, not 4"),
        ("1.34..1221.3432", "puzzle.txt:1: has 15 cells in one line, and a grid of 4 x 4 has 16"),
        ("1.34..1221.343210", "puzzle.txt:1: has 17 cells in one line, and a grid of 4 x 4 has 16"),
        ("1.34", "puzzle.txt:1: has 1 lines"),
        ("1.34\n..1x\n21.3\n4321", "puzzle.txt:2: holds 'x' at 4"),
        ("1.34\n..15\n21.3\n4321", "puzzle.txt:2: holds '5' at 4"),
        ("1.31\n..12\n21.3\n4321", "puzzle.txt:1: gives 1 twice in row 1"),
        ("1.34\n1...\n21.3\n4321", "puzzle.txt:2: gives 1 twice in column 1"),
        ("1...\n.1..\n....\n....", "puzzle.txt:2: gives 1 twice in box 1"),
    ],
)
def test_a_bad_grid_is_refused_with_its_line_and_what_to_do(text: str, said: str):
    with pytest.raises(DataError) as caught:
        read(text)
    assert f"{caught.value.where}: {caught.value.what}".startswith(said)
    assert caught.value.fix


def test_an_answer_that_breaks_a_rule_is_told_from_one_that_does_not():
    right = "534678912672195348198342567859761423426853791713924856961537284287419635345286179"
    tokens = LARGE.read(right, cells=81, where="x")
    assert not LARGE.breaks_rules(tokens)
    assert LARGE.breaks_rules(np.where(np.arange(81) == 40, 2, tokens))
    assert not GridText("maze", "?# SGo", 9, 0).breaks_rules(tokens)


def test_a_maze_keeps_its_open_cells_and_a_folder_without_symbols_has_characters_all_the_same():
    maze = GridText("maze", "?# SGo", 3, 0)
    assert maze.read("#S#\n# #\n#G#", cells=9, where="x").tolist() == [1, 3, 1, 1, 2, 1, 1, 4, 1]
    assert maze.read("S##\n   \n##G\n\n", cells=9, where="x").tolist() == [3, 1, 1, 2, 2, 2, 1, 1, 4]
    assert GridText("", "0123456789abc", 2, 0).write(np.array([1, 10, 11, 12])) == "1a\nbc"
