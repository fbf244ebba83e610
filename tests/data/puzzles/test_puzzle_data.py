"""`puzzle-data`, as it is typed: counts of every kind, a split that holds, and files that are refused with the line."""

from __future__ import annotations

import csv
import gzip
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from maze_maker import make_maze

from sftplay.cli import main
from sftplay.tasks.hrm.puzzles.arc import (
    WAYS,
    cropped,
    parse_name,
    read_asked,
    read_names,
    read_tasks,
    turned,
)
from sftplay.tasks.hrm.puzzles.folder import PuzzleFolder
from sftplay.tasks.hrm.puzzles.sampler import open_split
from sftplay.tasks.hrm.puzzles.sudoku import compute_grid_keys, find_solutions, sample_changes

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data"

QUESTION = "..3.2.6..9..3.5..1..18.64....81.29..7.......8..67.82....26.95..8..2.3..9..5.1.3.."
ANSWER = "483921657967345821251876493548132976729564138136798245372689514814253769695417382"


def make_puzzles(n: int, seed: int = 0) -> list[tuple[str, str]]:
    """Puzzles that are no copies of each other: solutions of half-filled grids, with 40 clues while unique."""
    stream = np.random.Generator(np.random.Philox(seed))
    found: list[tuple[str, str]] = []
    while len(found) < n:
        start = np.zeros((64, 9, 9), np.uint8)
        for grid in start:
            for box in range(3):
                grid[3 * box : 3 * box + 3, 3 * box : 3 * box + 3] = 1 + stream.permutation(9).reshape(3, 3)
        solved = find_solutions(start.reshape(64, 81), most=1)
        answers = solved.grids[np.unique(solved.owners, return_index=True)[1]]
        is_clue = stream.random(answers.shape) < 0.55
        questions = np.where(is_clue, answers, 0).astype(np.uint8)
        for place in np.flatnonzero(find_solutions(questions).counts == 1):
            texts = ("".join(map(str, row)) for row in (questions[place], answers[place]))
            found.append(tuple(texts))  # type: ignore[arg-type]
    return found[:n]


@pytest.fixture(scope="module")
def puzzles() -> list[tuple[str, str]]:
    return make_puzzles(60)


def write_csv(path: Path, pairs: list[tuple[str, str]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    opener: Any = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["source", "q", "a", "rating"])
        writer.writerows(["made", question, answer, 3] for question, answer in pairs)
    return path


def run(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    code = main(["puzzle-data", "--json", "--workers=1", *map(str, words)])
    shown = capsys.readouterr()
    assert code == 0, shown.err
    return json.loads(shown.out)


def refusal(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, dict[str, Any]]:
    code = main(["puzzle-data", "--json", "--workers=1", *map(str, words)])
    return code, json.loads(capsys.readouterr().out)["error"]


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def as_text(tokens: np.ndarray, symbols: str) -> str:
    return "".join(symbols[token] for token in tokens)


def test_sudoku_from_train_and_test_has_each_original_with_its_copies(
    puzzles: list[tuple[str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    write_csv(tmp_path / "in" / "train.csv.gz", puzzles[:40])
    write_csv(tmp_path / "in" / "test.csv", puzzles[40:])
    report = run(capsys, "--kind=sudoku", f"--in={tmp_path / 'in'}", f"--out={tmp_path / 'out'}", "--aug=25")
    assert report["train"] == {"groups": 40, "puzzles": 40 * 26, "examples": 40 * 26, "identifiers": 1}
    assert report["test"] == {"groups": 20, "puzzles": 20, "examples": 20, "identifiers": 1}
    assert report["test_puzzles_with_a_training_solution"] == 0
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == report
    folder = PuzzleFolder.open(tmp_path / "out" / "train")
    facts, only = folder.facts, folder.sets[0]
    assert (facts.vocab_size, facts.seq_len, facts.pad_id, facts.ignore_label_id) == (11, 81, 0, 0)
    for group, (question, answer) in enumerate(puzzles[:40]):
        first = only.group_indices[group]
        assert as_text(only.inputs[first], facts.symbols) == question.replace("0", ".")
        assert as_text(only.labels[first], facts.symbols) == answer
    questions, answers = only.inputs[:] - 1, only.labels[:] - 1
    assert len({row.tobytes() for row in questions}) == 40 * 26
    assert ((questions == 0) | (questions == answers)).all()
    assert np.array_equal(compute_grid_keys(answers), np.repeat(compute_grid_keys(answers[::26]), 26))
    test = open_split(str(tmp_path / "out"), "test", key="data.val_path").sets[0]
    assert [as_text(row, facts.symbols) for row in test.labels] == [answer for _, answer in puzzles[40:]]


def test_a_single_file_is_split_by_solution(
    puzzles: list[tuple[str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    # Three puzzles of each solution; two of them turned round and renamed, which makes no other solution of it.
    stream = np.random.Generator(np.random.Philox(3))
    pairs = []
    for question, answer in puzzles[:30]:
        pairs.append((question, answer))
        for change in (sample_changes(1, stream), sample_changes(1, stream)):
            grids = [np.array([[int(cell) for cell in text]], np.uint8) for text in (question, answer)]
            pairs.append(tuple("".join(map(str, change.apply(grid)[0])) for grid in grids))
    source = write_csv(tmp_path / "all.csv", pairs)
    words = ("--kind=sudoku", f"--in={source}", "--aug=0", "--held-out=0.3")
    report = run(capsys, *words, f"--out={tmp_path / 'out'}")
    assert report["train"]["groups"] + report["test"]["groups"] == 90
    assert 3 <= report["test"]["groups"] <= 54
    assert report["test_puzzles_with_a_training_solution"] == 0
    keys = {
        split: compute_grid_keys(PuzzleFolder.open(tmp_path / "out" / split).sets[0].labels[:] - 1)
        for split in report
        if split in ("train", "test")
    }
    assert not set(keys["train"].tolist()) & set(keys["test"].tolist())
    # The same seed splits alike, another one does not; nothing depends on the order of the file.
    again = run(capsys, *words, f"--out={tmp_path / 'again'}")
    assert {**again, "source": 0} == {**report, "source": 0}
    assert (tmp_path / "again/train/all__inputs.npy").read_bytes() == (
        tmp_path / "out/train/all__inputs.npy"
    ).read_bytes()
    run(capsys, *words, "--seed=1", f"--out={tmp_path / 'other'}")
    assert (tmp_path / "other/test/all__inputs.npy").read_bytes() != (
        tmp_path / "out/test/all__inputs.npy"
    ).read_bytes()


def test_a_subsample_is_drawn_by_the_seed(
    puzzles: list[tuple[str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    write_csv(tmp_path / "in" / "train.csv", puzzles[:40])
    write_csv(tmp_path / "in" / "test.csv", puzzles[40:])
    inputs_by_seed = []
    for seed in (0, 0, 1):
        out = tmp_path / str(len(inputs_by_seed))
        words = ("--kind=sudoku", f"--in={tmp_path / 'in'}", f"--out={out}", "--aug=3", "--subsample=10")
        report = run(capsys, *words, f"--seed={seed}")
        assert (report["train"]["groups"], report["train"]["examples"], report["test"]["groups"]) == (10, 40, 20)
        inputs_by_seed.append(PuzzleFolder.open(out / "train").sets[0].inputs[:].tobytes())
    assert inputs_by_seed[0] == inputs_by_seed[1] != inputs_by_seed[2]
    for n in (0, 41):
        words = ("--kind=sudoku", f"--in={tmp_path / 'in'}", f"--out={tmp_path / 'x'}", f"--subsample={n}")
        code, error = refusal(capsys, *words)
        assert (code, error["where"], error["what"]) == (2, "--subsample", f"is {n}; there are 40 training puzzles")


TWO = ANSWER.translate(str.maketrans("12", ".."))
"""The digits 1 and 2 can be exchanged: two solutions at least."""

NONE = "11" + QUESTION[2:]
SWAPPED = ANSWER.translate(str.maketrans("39", "93"))
HOSTILE = {
    "short": (QUESTION[:-1], ANSWER, "the question has 80 characters, not 81"),
    "long": (QUESTION, ANSWER + "1", "the answer has 82 characters, not 81"),
    "empty": ("", ANSWER, "the question has 0 characters, not 81"),
    "letters": (QUESTION[:4] + "x" + QUESTION[5:], ANSWER, "holds 'x' at 5; a cell is one of '.0123456789'"),
    "other digits": (QUESTION[:4] + "²" + QUESTION[5:], ANSWER, "the question holds '²' at 5"),
    "two solutions": (TWO, ANSWER, "the question has 2 solutions or more"),
    "no solution": (NONE, ANSWER, "the question has no solution"),
    "a wrong answer": (QUESTION, "84" + ANSWER[2:], "the answer does not have all digits in column 1"),
    "a changed given": (QUESTION, SWAPPED, "the answer has 9 in row 1, column 3, where the question gives 3"),
    "a digit twice": (QUESTION, "8" + ANSWER[1:], "the answer does not have all digits in row 1"),
    "an answer with blanks": (QUESTION, "." + ANSWER[1:], "the answer has blanks"),
}


@pytest.mark.contract
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_sudoku_that_cannot_be_used_is_refused_with_its_line(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    question, answer, words = HOSTILE[kind]
    source = write_csv(tmp_path / "all.csv", [(QUESTION, ANSWER), (question, answer)])
    code, error = refusal(capsys, "--kind=sudoku", f"--in={source}", f"--out={tmp_path / 'out'}")
    assert code == 4
    assert error["where"] == f"{source}:3"
    assert words in error["what"]
    assert error["fix"] == "correct the line, or take it out"
    assert names_in(tmp_path) == ["all.csv"]


FILES = {
    "nothing": (b"", "holds no puzzle"),
    "a header alone": (b"source,q,a,rating\n", "holds no puzzle"),
    "other columns": (b"x,y\n1,2\n", "has no question: its columns are x, y"),
    "no answers": (b"q,y\n1,2\n", "has no answer: its columns are q, y"),
    "too few cells": (f"q,a\n{QUESTION}\n".encode(), "has 1 columns where the header has 2"),
    "no text": (b"q,a\n\xff\xfe\xfa,1\n", "bytes that are not UTF-8"),
}


@pytest.mark.contract
@pytest.mark.parametrize("kind", FILES)
def test_a_file_without_puzzles_is_refused(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    content, words = FILES[kind]
    source = tmp_path / "all.csv"
    source.write_bytes(content)
    code, error = refusal(capsys, "--kind=sudoku", f"--in={source}", f"--out={tmp_path / 'out'}")
    assert code == 4
    assert error["where"].startswith(str(source))
    assert words in error["what"]
    assert error["fix"]


@pytest.mark.contract
def test_all_bad_lines_are_told_up_to_a_hundred(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source = write_csv(tmp_path / "all.csv", [("1", "2")] * 5000)
    assert main(["puzzle-data", "--kind=sudoku", f"--in={source}", f"--out={tmp_path / 'out'}"]) == 4
    shown = capsys.readouterr().err
    assert shown.count("all.csv:") == 100
    assert "more problems" in shown


@pytest.fixture(scope="module")
def mazes() -> list[tuple[str, str]]:
    return [make_maze(seed) for seed in range(12)]


def test_a_maze_has_as_many_copies_as_there_are_ways_to_turn_it(
    mazes: list[tuple[str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    write_csv(tmp_path / "in" / "train.csv", mazes[:8])
    write_csv(tmp_path / "in" / "test.csv", mazes[8:])
    plain = run(capsys, "--kind=maze", f"--in={tmp_path / 'in'}", f"--out={tmp_path / 'plain'}")
    assert (plain["copies"], plain["train"]["examples"], plain["test"]["examples"]) == (0, 8, 4)
    report = run(capsys, "--kind=maze", f"--in={tmp_path / 'in'}", f"--out={tmp_path / 'out'}", "--aug=7")
    assert report["train"] == {"groups": 8, "puzzles": 64, "examples": 64, "identifiers": 1}
    folder = PuzzleFolder.open(tmp_path / "out" / "train")
    assert (folder.facts.vocab_size, folder.facts.seq_len, folder.facts.symbols) == (6, 900, "?# SGo")
    only = folder.sets[0]
    for number, texts in enumerate(mazes[:8]):
        for rows, text in ((only.inputs, texts[0]), (only.labels, texts[1])):
            grid = np.array([folder.facts.symbols.index(symbol) for symbol in text]).reshape(30, 30)
            expected = {turned(grid, way).astype(np.uint8).tobytes() for way in WAYS}
            assert as_text(rows[8 * number], folder.facts.symbols) == text
            assert {row.tobytes() for row in rows[8 * number : 8 * number + 8]} == expected
    code, error = refusal(capsys, "--kind=maze", f"--in={tmp_path / 'in'}", f"--out={tmp_path / 'x'}", "--aug=8")
    assert (code, error["fix"]) == (2, "take up to 7")


@pytest.mark.contract
def test_a_turned_maze_in_the_test_is_refused_with_both_lines(
    mazes: list[tuple[str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    copy = tuple("".join(np.rot90(np.array(list(text)).reshape(30, 30)).ravel()) for text in mazes[2])
    train = write_csv(tmp_path / "in" / "train.csv", mazes[:8])
    test = write_csv(tmp_path / "in" / "test.csv", [mazes[9], copy])  # type: ignore[list-item]
    code, error = refusal(capsys, "--kind=maze", f"--in={tmp_path / 'in'}", f"--out={tmp_path / 'out'}")
    assert (code, error["where"], error["what"]) == (4, f"{test}:3", f"is a copy of the training puzzle {train}:4")


def spoilt_mazes(question: str, answer: str) -> dict[str, tuple[str, str, str]]:
    wall, way = question.index("#"), answer.index("o")
    walled = question.replace(" ", "#")
    detour = next(place for place in range(900) if question[place] == " " and answer[place] == " ")
    return {
        "two starts": (question[:wall] + "S" + question[wall + 1 :], answer, "has 2 cells S, not one"),
        "no goal": (question.replace("G", " "), answer, "has 0 cells G, not one"),
        "solved already": (answer, answer, "has cells o, which only an answer has"),
        "another wall": (question, answer[:wall] + " " + answer[wall + 1 :], "the answer changes the maze in row"),
        "no way": (walled, walled, "the question has no way from S to G"),
        "a gap": (question, answer[:way] + " " + answer[way + 1 :], "do not lead from S to G"),
        "a longer way": (question, answer[:detour] + "o" + answer[detour + 1 :], "the shortest one"),
        "letters": (question.replace("S", "A"), answer, "the question holds 'A'"),
        "short": (question[:-30], answer, "has 870 characters, not 900"),
    }


@pytest.mark.contract
def test_a_maze_that_cannot_be_used_is_refused_with_its_line(
    mazes: list[tuple[str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for name, (question, answer, words) in spoilt_mazes(*mazes[0]).items():
        source = write_csv(tmp_path / f"{name}.csv", [mazes[1], (question, answer)])
        code, error = refusal(capsys, "--kind=maze", f"--in={source}", f"--out={tmp_path / 'out'}")
        assert code == 4, name
        assert error["where"] == f"{source}:3", name
        assert words in error["what"], name


def write_tasks(folder: Path) -> Path:
    """Two training tasks and one of the evaluation with two test pairs."""
    content = {
        "training/aa": {"train": [[[[1, 2]], [[2, 1]]], [[[3, 4, 5]], [[5, 4, 3]]]], "test": [[[[6]], [[7]]]]},
        "training/bb": {"train": [[[[1], [0]], [[0, 0], [1, 1]]]], "test": [[[[2], [0]], [[0, 0], [2, 2]]]]},
        "evaluation/cc": {
            "train": [[[[1, 1], [2, 3]], [[4]]], [[[5, 6, 7], [8, 9, 0]], [[1]]], [[[8, 8]], [[8]]]],
            "test": [[[[1, 2], [3, 4]], [[5, 6]]], [[[7, 0, 7]], [[8, 8, 1]]]],
        },
    }
    for name, parts in content.items():
        path = folder / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        pairs = {part: [{"input": a, "output": b} for a, b in pairs] for part, pairs in parts.items()}
        path.write_text(json.dumps(pairs))
    return folder


@pytest.fixture(scope="module")
def arc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("arc")
    write_tasks(place / "in" / "data")
    words = ["--kind=arc", f"--in={place / 'in'}", f"--out={place / 'out'}", "--aug=40", "--workers=1"]
    assert main(["puzzle-data", *words]) == 0
    return place


def test_arc_has_all_that_is_not_asked_and_asks_the_test_pairs_of_the_evaluation(arc: Path):
    report = json.loads((arc / "out" / "report.json").read_text())
    # Copies of a task all differ; tasks with many colours reach 40 of them.
    assert report["train"] == {"groups": 3, "puzzles": 123, "examples": 41 * (3 + 2 + 3), "identifiers": 124}
    assert report["test"] == {"groups": 1, "puzzles": 41, "examples": 82, "identifiers": 124}
    names = read_names(arc / "out" / "test")
    assert names[0] == "<blank>"
    assert len(set(names)) == 124
    assert [name for name in names if "|" not in name] == ["<blank>", "aa", "bb", "cc"]
    facts = PuzzleFolder.open(arc / "out" / "train").facts
    assert (facts.vocab_size, facts.seq_len, facts.pad_id, facts.blank_identifier_id) == (12, 900, 0, 0)
    test = PuzzleFolder.open(arc / "out" / "test").sets[0]
    assert {parse_name(names[number])[0] for number in test.puzzle_identifiers} == {"cc"}
    assert list(read_asked(arc / "out" / "test")) == ["cc"]


def test_every_arc_row_leads_back_to_its_pair(arc: Path):
    tasks = {t.id: t for part in ("training", "evaluation") for t in read_tasks(arc / "in/data" / part)}
    names = read_names(arc / "out" / "train")
    for split, part in (("train", "train"), ("test", "test")):
        only = PuzzleFolder.open(arc / "out" / split).sets[0]
        in_corner = 0
        for puzzle, (start, end) in enumerate(zip(only.puzzle_indices[:-1], only.puzzle_indices[1:], strict=True)):
            task, change = parse_name(names[only.puzzle_identifiers[puzzle]])
            pairs = tasks[task].pairs if task in ("aa", "bb") else getattr(tasks[task], part)
            assert end - start == len(pairs)
            for row, pair in zip(range(start, end), pairs, strict=True):
                grids = []
                tops = set()
                for tokens in (only.inputs[row], only.labels[row]):
                    canvas = tokens.reshape(30, 30)
                    filled = np.argwhere(canvas > 1)
                    top, left = filled.min(axis=0)
                    tops.add((int(top), int(left)))
                    grids.append(change.undo(cropped(np.roll(canvas, (-top, -left), (0, 1)))))
                assert len(tops) == 1  # question and answer lie at the same place
                in_corner += tops == {(0, 0)}
                assert np.array_equal(grids[0], pair.input)
                assert np.array_equal(grids[1], pair.output)
        # All test pairs lie in the corner, and of each copy at least one demonstration.
        assert in_corner == len(only) if split == "test" else 123 <= in_corner < 160


@pytest.mark.contract
def test_a_task_on_both_sides_is_refused_with_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source = write_tasks(tmp_path / "in")
    (source / "evaluation/aa.json").write_text((source / "training/aa.json").read_text())
    code, error = refusal(capsys, "--kind=arc", f"--in={source}", f"--out={tmp_path / 'out'}")
    assert (code, error["where"], error["what"]) == (4, "aa", "is a task of training and of the evaluation")
    assert names_in(tmp_path) == ["in"]


def test_sudoku4_needs_no_file_and_is_the_builtin_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SFTPLAY_CACHE", str(tmp_path / "cache"))
    report = run(capsys, "--kind=sudoku4", f"--out={tmp_path / 'out'}")
    assert (report["train"]["groups"], report["test"]["groups"]) == (1200, 264)
    builtin = open_split("builtin:sudoku4", "train", key="data.train_path")
    assert np.array_equal(PuzzleFolder.open(tmp_path / "out/train").sets[0].inputs, builtin.sets[0].inputs)
    for words, where in (("--in=x.csv", "--in"), ("--aug=3", "--aug"), ("--subsample=3", "--subsample")):
        code, error = refusal(capsys, "--kind=sudoku4", f"--out={tmp_path / 'x'}", words)
        assert (code, error["where"], error["fix"][:12]) == (2, where, "leave it out")


@pytest.mark.contract
def test_a_folder_that_is_there_stays_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    code, error = refusal(capsys, "--kind=sudoku4", f"--out={tmp_path / 'out'}")
    assert (code, error["what"]) == (2, "exists already")
    assert names_in(tmp_path / "out") == ["mine.txt"]


@pytest.mark.contract
def test_settings_that_do_not_fit_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = f"--out={tmp_path / 'out'}"
    assert refusal(capsys, "--kind=sudoku", out)[1]["where"] == "--in"
    assert refusal(capsys, "--kind=sudoku", out, f"--in={tmp_path / 'no'}")[1]["what"] == "no such file or folder"
    code, error = refusal(capsys, "--kind=sudoku", out, f"--in={tmp_path}")
    assert (code, error["what"]) == (4, "holds no file called train")
    (tmp_path / "puzzles.jsonl").write_text("")
    (tmp_path / "README.md").write_text("")
    error = refusal(capsys, "--kind=sudoku", out, f"--in={tmp_path}")[1]
    assert error["fix"].endswith(f"which is then split: --in={tmp_path / 'puzzles.jsonl'}")
    code, error = refusal(capsys, "--kind=chess", out)
    assert (code, "'chess'" in error["what"]) == (2, True)
    assert refusal(capsys, "--kind=sudoku4", out, "train.max_steps=3")[0] == 2
    code, error = refusal(capsys, "--kind=sudoku4", out, "--seed=-1")
    assert (code, "not a seed" in error["what"]) == (2, True)
    code, error = refusal(capsys, "--kind=arc", out, f"--in={tmp_path}", "--subsample=3")
    assert (code, error["where"]) == (2, "--subsample")


def test_a_killed_command_leaves_no_folder_and_the_next_one_makes_it(
    puzzles: list[tuple[str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    write_csv(tmp_path / "in" / "train.csv", puzzles[:40])
    write_csv(tmp_path / "in" / "test.csv", puzzles[40:])
    out = tmp_path / "out"
    words = ["--kind=sudoku", f"--in={tmp_path / 'in'}", f"--out={out}"]
    code = (  # it waits behind the first group
        "import sys\n"
        "from sftplay.tasks.hrm.puzzles.folder import SplitWriter\n"
        "SplitWriter.add = lambda *_: (print('wrote', flush=True), sys.stdin.read())\n"
        "from sftplay.cli import main\n"
        "main(['puzzle-data', '--workers=1', *sys.argv[1:]])\n"
    )
    started = subprocess.Popen([sys.executable, "-c", code, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert started.stdout is not None
    assert b"wrote\n" in iter(started.stdout.readline, b"")
    second_code, error = refusal(capsys, *words)
    assert (second_code, error["what"]) == (2, "another command is writing it")
    started.send_signal(signal.SIGKILL)
    started.communicate()
    assert not out.exists()
    report = run(capsys, *words, "--aug=2")
    assert report["train"]["examples"] == 120
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


@pytest.mark.slow
def test_several_processes_write_what_one_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_csv(tmp_path / "in" / "train.csv", make_puzzles(40))
    # Beyond the number that makes processes worth their start; the same puzzle may come again within the test.
    write_csv(tmp_path / "in" / "test.csv", make_puzzles(100, seed=1) * 170)
    write_tasks(tmp_path / "tasks")
    for kind, source, copies in (("sudoku", "in", 1), ("arc", "tasks", 700)):
        for workers in (1, 2):
            out = tmp_path / f"{kind}{workers}"
            words = [f"--kind={kind}", f"--in={tmp_path / source}", f"--out={out}", f"--aug={copies}"]
            assert main(["puzzle-data", *words, f"--workers={workers}"]) == 0
        first, second = (sorted((tmp_path / f"{kind}{n}").rglob("*.npy")) for n in (1, 2))
        assert len(first) == 10
        assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    capsys.readouterr()


@pytest.mark.contract
@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/data")
def test_the_real_puzzles_and_tasks_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source = SHARED / "sudoku" / "puzzles.jsonl"
    report = run(capsys, "--kind=sudoku", f"--in={source}", f"--out={tmp_path / 'sudoku'}", "--aug=10")
    assert report["train"]["groups"] + report["test"]["groups"] == 147
    assert report["train"]["examples"] == 11 * report["train"]["groups"]
    report = run(capsys, "--kind=arc", f"--in={SHARED / 'arc'}", f"--out={tmp_path / 'arc'}", "--aug=5")
    assert (report["training_tasks"], report["evaluation_tasks"], report["train"]["groups"]) == (30, 15, 45)
    assert report["test_pairs_like_a_demonstration"] == 1  # of task 00576224
    published = [json.loads(path.read_text()) for path in sorted((SHARED / "arc").rglob("*.json"))]
    n_pairs = sum(len(task["train"]) for task in published)
    n_pairs += sum(len(json.loads(path.read_text())["test"]) for path in (SHARED / "arc" / "training").glob("*.json"))
    # Every task has at least five copies that differ, or as many as it can have.
    assert report["train"]["examples"] <= 6 * n_pairs
    assert report["train"]["puzzles"] >= 45 * 5
