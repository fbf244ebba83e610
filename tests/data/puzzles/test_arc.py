"""Tasks of ARC: read, changed and changed back, written on the canvas, and decided by votes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from sftplay.errors import SeveralErrors
from sftplay.tasks.hrm.puzzles.arc import (
    ALPHABET,
    INVERSE,
    ArcTask,
    Ballots,
    Change,
    GridPair,
    Tally,
    as_json,
    canonical,
    compute_ranks,
    cropped,
    on_canvas,
    parse_name,
    read_tasks,
    sample_changes,
    share_solved,
    turned,
)
from sftplay.tasks.hrm.puzzles.sampler import make_generator

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data" / "arc"

sizes = st.integers(1, 30)
grids = st.tuples(sizes, sizes).flatmap(lambda shape: arrays(np.uint8, shape, elements=st.integers(0, 9)))
changes = st.builds(lambda way, rest: Change(way, (0, *rest)), st.integers(0, 7), st.permutations(range(1, 10)))


def grid(*rows: str) -> np.ndarray:
    return np.array([[int(cell) for cell in row] for row in rows], np.uint8)


def task(name: str = "t", *, n_test: int = 1) -> ArcTask:
    pair = GridPair(grid("120", "003"), grid("12", "34"))
    tests = (GridPair(grid("11", "22"), grid("21")), GridPair(grid("55"), grid("5", "5")))
    return ArcTask(name, (pair,), tests[:n_test])


@given(grids, changes)
def test_a_change_is_undone_exactly_and_its_name_says_how(cells: np.ndarray, change: Change):
    assert np.array_equal(change.undo(change.apply(cells)), cells)
    assert parse_name(change.name("0a1d4ef5")) == ("0a1d4ef5", change)


def test_the_eight_ways_are_those_of_a_hand_drawn_grid():
    corner = grid("12", "34")
    expected = ["12/34", "24/13", "43/21", "31/42", "21/43", "34/12", "13/24", "42/31"]
    assert ["/".join("".join(map(str, row)) for row in turned(corner, way)) for way in range(8)] == expected
    for way in range(8):
        assert np.array_equal(turned(turned(corner, way), INVERSE[way]), corner)


@given(grids, st.data())
def test_a_grid_on_the_canvas_has_its_lines_where_there_is_room(cells: np.ndarray, data: st.DataObject):
    height, width = cells.shape
    top = data.draw(st.integers(0, 30 - height))
    left = data.draw(st.integers(0, 30 - width))
    canvas = on_canvas(cells, top=top, left=left).reshape(30, 30)
    expected = np.zeros((31, 31), np.uint8)  # one line more on each side, cut off below
    expected[top : top + height, left : left + width] = cells + 2
    expected[top + height, left : left + width] = 1
    expected[top : top + height, left + width] = 1
    assert np.array_equal(canvas, expected[:30, :30])
    assert np.array_equal(cropped(np.roll(canvas, (-top, -left), (0, 1)).ravel()), cells)
    assert len(ALPHABET.symbols) == 12


def test_copies_all_differ_and_the_first_is_the_original():
    found = sample_changes(task(), 50, stream=make_generator(b"t", 3))
    assert found[0] == Change()
    looks = {json.dumps(as_json(changed(task(), change))) for change in found}
    assert len(looks) == len(found) == 51
    assert sample_changes(task(), 50, stream=make_generator(b"t", 3)) == found
    assert sample_changes(task(), 50, stream=make_generator(b"t", 4)) != found


def changed(one: ArcTask, change: Change) -> ArcTask:
    parts = [
        tuple(GridPair(change.apply(p.input), change.apply(p.output)) for p in part) for part in (one.train, one.test)
    ]
    return ArcTask(one.id, *parts)


@given(grids, grids, changes)
def test_the_canonical_form_is_one_for_all_copies_of_a_pair(first: np.ndarray, second: np.ndarray, change: Change):
    pair = GridPair(first, second)
    copy = GridPair(change.apply(first), change.apply(second))
    assert canonical(pair) == canonical(copy)
    recoloured = np.where(second == second[0, 0], (second[0, 0] + 1) % 10, second)  # a colour more, or one less
    if len(np.unique(recoloured)) != len(np.unique(second)) and not np.isin(first, second).any():
        assert canonical(pair) != canonical(GridPair(first, recoloured))
    assert canonical(pair) != canonical(GridPair(first, np.pad(second, 1)))


HOSTILE = {
    "no json": ("{", "is no JSON"),
    "empty": ("", "is empty"),
    "a list": ("[]", "is no object with `train` and `test`"),
    "no test": ('{"train": [{"input": [[1]], "output": [[1]]}]}', "is no list of pairs"),
    "no output": ('{"train": [{"input": [[1]]}], "test": []}', "has no `output`"),
    "an empty pair": ('{"train": [{}], "test": []}', "has no `input` and no `output`"),
    "ragged": ('{"train": [{"input": [[1, 2], [1]], "output": [[1]]}], "test": []}', "row 2 has 1 cells, row 1 has 2"),
    "a colour": ('{"train": [{"input": [[10]], "output": [[1]]}], "test": []}', "holds 10, which is no colour"),
    "a word": ('{"train": [{"input": [["1"]], "output": [[1]]}], "test": []}', "holds '1', which is no colour"),
    "true": ('{"train": [{"input": [[true]], "output": [[1]]}], "test": []}', "holds True, which is no colour"),
    "no rows": ('{"train": [{"input": [], "output": [[1]]}], "test": []}', "is no list of rows"),
    "large": (json.dumps({"train": [{"input": [[0] * 31], "output": [[1]]}], "test": []}), "1 x 31, larger than 30"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_file_that_holds_no_task_is_refused_with_its_place(tmp_path: Path, kind: str):
    text, words = HOSTILE[kind]
    (tmp_path / "bad.json").write_text(text)
    (tmp_path / "good.json").write_text(json.dumps(as_json(task())))
    with pytest.raises(SeveralErrors) as raised:
        read_tasks(tmp_path)
    (problem,) = raised.value.problems
    assert words in problem.what
    assert str(tmp_path / "bad.json") in problem.where
    assert problem.fix
    assert raised.value.exit_code == 4


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/data/arc")
def test_the_published_tasks_load():
    tasks = [one_task for part in ("training", "evaluation") for one_task in read_tasks(SHARED / part)]
    assert len(tasks) == 45
    for one_task in tasks:
        published = json.loads(next(SHARED.rglob(f"{one_task.id}.json")).read_text())
        assert as_json(one_task) == {part: published[part] for part in ("train", "test")}


def answer(change: Change, question: np.ndarray, says: np.ndarray, *, q_halt: float, name: str = "t") -> dict[str, Any]:
    """What a model says to a copy, as tokens."""
    inputs, predicted = (on_canvas(change.apply(cells)) for cells in (question, says))
    return {"name": change.name(name), "inputs": inputs, "predicted": predicted, "q_halt": q_halt}


TURN, COLOURS = Change(1), Change(0, (0, 2, 1, *range(3, 10)))
BOTH = Change(6, (0, 9, 8, 7, 6, 5, 4, 3, 2, 1))


def count_votes(answers: list[dict[str, Any]]) -> Ballots:
    tally = Tally()
    for copy_answer in answers:
        tally.add(**copy_answer)
    return tally.ballots()


def test_votes_count_first_and_the_mean_confidence_decides_between_equals():
    question, right, wrong, odd = grid("11", "22"), grid("21"), grid("12"), grid("7")
    answers = [
        answer(Change(), question, wrong, q_halt=0.0),  # 1/2
        answer(TURN, question, right, q_halt=math.log(3)),  # 3/4
        answer(COLOURS, question, right, q_halt=0.0),  # 1/2
        answer(BOTH, question, wrong, q_halt=math.log(9)),  # 9/10
        answer(Change(3), question, odd, q_halt=50.0),  # 1: the surest of all, with one vote
        answer(Change(2), question, np.zeros((0, 0), np.uint8), q_halt=9.0),  # says nothing
    ]
    (ranked,) = count_votes(answers).values()
    assert [candidate.grid.tolist() for candidate in ranked] == [[[1, 2]], [[2, 1]], [[7]]]
    assert [candidate.votes for candidate in ranked] == [2, 2, 1]
    assert [candidate.confidence for candidate in ranked] == pytest.approx([0.7, 0.625, 1.0])
    assert max(compute_ranks(task(), count_votes(answers))) == 2
    assert share_solved([[2.0]]) == {1: 0.0, 2: 1.0, 10: 1.0, 100: 1.0, 1000: 1.0}


def test_a_task_is_solved_when_all_its_test_inputs_are():
    two = task(n_test=2)
    first, second = two.test
    ballots = count_votes([answer(TURN, first.input, first.output, q_halt=0.0)])
    assert max(compute_ranks(two, ballots)) == math.inf  # nothing was said of the second
    ballots = count_votes(
        [
            answer(TURN, first.input, first.output, q_halt=0.0),
            answer(Change(), second.input, grid("3"), q_halt=0.0),
            answer(COLOURS, second.input, grid("3"), q_halt=0.0),
            answer(BOTH, second.input, second.output, q_halt=0.0),
        ]
    )
    assert max(compute_ranks(two, ballots)) == 2
    # Four tasks: solved at 1, at 2, never (no answer), never (a wrong answer).
    tasks = {"one": ArcTask("one", (), two.test[:1]), "t": two, "none": ArcTask("none", (), two.test)}
    tasks["bad"] = ArcTask("bad", (), two.test[:1])
    ballots |= count_votes([answer(BOTH, first.input, first.output, q_halt=1.0, name="one")])
    ballots |= count_votes([answer(BOTH, first.input, grid("4"), q_halt=1.0, name="bad")])
    tries = [[max(compute_ranks(one_task, ballots))] for one_task in tasks.values()]
    assert share_solved(tries, ks=(1, 2, 1000)) == {1: 0.25, 2: 0.5, 1000: 0.5}
    # TRM counts the share of a task's test inputs (evaluators/arc.py): of `t` the first is right with one try.
    ranks = [compute_ranks(one_task, ballots) for one_task in tasks.values()]
    assert share_solved(ranks, ks=(1, 2, 1000)) == {1: (1 + 0.5) / 4, 2: 0.5, 1000: 0.5}


def test_the_highest_and_lowest_scores_are_no_overflow():
    answers = [answer(Change(), grid("1"), grid("1"), q_halt=q) for q in (1e4, -1e4)]
    (ranked,) = count_votes(answers).values()
    assert ranked[0].confidence == 0.5
