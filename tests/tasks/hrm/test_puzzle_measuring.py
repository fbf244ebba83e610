"""Puzzles measured and solved: by hand with planted answers, over two processes, and with a finished run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gloo_ranks import on_ranks

from sftplay.cli import main
from sftplay.tasks.hrm import measuring
from sftplay.tasks.hrm.finished import figures_table
from sftplay.tasks.hrm.measuring import format_summary, measure
from sftplay.tasks.hrm.network import Grid, PuzzleModel, SegmentOutput
from sftplay.tasks.hrm.puzzles.arc import ALPHABET, Change, on_canvas
from sftplay.tasks.hrm.puzzles.folder import Group, PuzzleFolder, write_folder
from sftplay.tasks.hrm.puzzles.sampler import open_split
from sftplay.tasks.hrm.puzzles.sudoku import SMALL_ALPHABET as SUDOKU4
from sftplay.tasks.hrm.section import HrmConfig

SEGMENTS = 3
HRM: dict[str, Any] = {
    "hidden_size": 32, "num_heads": 2, "h_layers": 1, "l_layers": 1, "positions": "learned", "n_supervision": SEGMENTS,
    "q_continue": False, "loss_precision": "fp32",
}  # fmt: skip


def model_for(puzzles: PuzzleFolder, **more: Any) -> PuzzleModel:
    facts = puzzles.facts
    grid = Grid(vocab_size=facts.vocab_size, cells=facts.seq_len, identifiers=facts.num_puzzle_identifiers)
    torch.manual_seed(0)
    return PuzzleModel(HrmConfig(**{**HRM, **more}), grid)


def plant(monkeypatch: pytest.MonkeyPatch, answers: list[tuple[Any, list[float]]], vocab: int) -> None:
    """Have the model answer so: for each segment its cells [batch, cells] and q_halt [batch]."""

    def refined(model: Any, inputs: Any, identifiers: Any) -> Any:
        for cells, q in answers:
            logits = torch.nn.functional.one_hot(torch.as_tensor(np.asarray(cells)).long(), vocab).float()
            yield SegmentOutput(logits[: len(inputs)], torch.tensor(q)[: len(inputs)], torch.zeros(len(inputs)))

    monkeypatch.setattr(measuring, "refined", refined)


@pytest.fixture
def two(tmp_path: Path) -> PuzzleFolder:
    """Two puzzles of four cells; the second has a cell without a label."""
    from sftplay.tasks.hrm.puzzles.folder import Alphabet

    group = Group(np.array([[1, 2, 1, 1], [1, 1, 1, 3]], np.uint8), np.array([[2, 2, 3, 4], [2, 3, 0, 3]], np.uint8))
    write_folder(tmp_path, [group], alphabet=Alphabet(kind="", symbols=" .123", shape=(2, 2)))
    return PuzzleFolder.open(tmp_path)


def test_figures_of_each_segment_and_of_both_ways_to_halt_are_those_by_hand(two, monkeypatch):
    right = [[2, 2, 3, 4], [2, 3, 1, 3]]
    answers = [
        ([[2, 2, 3, 1], right[1]], [-1.0, 1.0]),  # 3 of 4 cells; the second is whole, and would halt here
        ([right[0], [2, 4, 1, 3]], [1.0, -1.0]),  # the first would halt here; the second gets worse: 2 of 3
        ([right[0], [2, 4, 1, 1]], [1.0, 1.0]),  # 1 of 3, which it takes for right
    ]
    plant(monkeypatch, answers, vocab=5)
    found = measure(model_for(two), two, hrm=HrmConfig(**HRM), at_once=2)
    exact = [each["exact_accuracy"] for each in found.figures["segments"]]
    cells = [each["accuracy"] for each in found.figures["segments"]]
    # The questions leave cells 0, 2 and 3 of the first and cells 0 and 1 of the second puzzle; the last has no label.
    blanks = [each["blank_accuracy"] for each in found.figures["segments"]]
    assert blanks == pytest.approx([(2 + 2) / 5, (3 + 1) / 5, (3 + 1) / 5])
    assert found.figures["halting_q"]["blank_accuracy"] == 1.0
    judged = [each["q_halt_accuracy"] for each in found.figures["segments"]]
    assert exact == [0.5, 0.5, 0.5]
    assert cells == pytest.approx([(3 / 4 + 1) / 2, (1 + 2 / 3) / 2, (1 + 1 / 3) / 2])
    assert judged == [1.0, 1.0, 0.5]
    halting = found.figures["halting_q"]
    assert (halting["exact_accuracy"], halting["accuracy"], halting["segments"]) == (1.0, 1.0, 1.5)
    assert found.figures["exact_accuracy"] == 0.5
    assert [line["correct"] for line in found.lines] == [True, False]
    assert [line["halted_after"] for line in found.lines] == [2, 1]
    assert found.lines[1]["prompt"] == "..\n.2"
    assert found.lines[1]["reference"] == "12\n·2"
    by_q = measure(model_for(two), two, hrm=HrmConfig(**HRM, eval_halt="q"), at_once=2)
    assert by_q.figures["exact_accuracy"] == 1.0
    assert [line["correct"] for line in by_q.lines] == [True, True]
    assert "halts at 1.50" in figures_table(found.figures)


@pytest.mark.parametrize("at_once", [7, 300])
def test_the_number_of_puzzles_at_a_time_changes_nothing_and_padding_counts_for_nothing(at_once: int):
    puzzles = open_split("builtin:sudoku4", "test", key="x")
    model = model_for(puzzles)
    found, whole = (measure(model, puzzles, hrm=model.hrm, at_once=each) for each in (at_once, 264))
    assert found.figures["n"] == 264
    assert found.figures["accuracy"] == pytest.approx(whole.figures["accuracy"], abs=1e-12)
    assert found.lines[0] == whole.lines[0]


WAYS = 6
SAID = {
    # Task -> for each copy the colour it answers; 9 is right. The lower a copy's number, the surer it is.
    "first": [1, 9, 2, 9, 3, 4],  # two votes, no other has as many: solved with one try
    "second": [1, 1, 1, 9, 9, 2],  # behind three votes: with two
    "sixth": [1, 2, 3, 4, 5, 9],  # one vote as all others, and the least sure: with six
    "never": [1, 1, 2, 2, 3, 3],
}


def write_arc(folder: Path) -> PuzzleFolder:
    """Tasks that ask for one cell, each in six copies, as `puzzle-data` leaves them."""
    names, groups, tasks = ["<blank>"], [], {}
    for number, name in enumerate(SAID):
        asked, right = np.array([[number + 1, 0]], np.uint8), np.array([[9]], np.uint8)
        changes = [Change(way) for way in range(WAYS)]
        names += [change.name(name) for change in changes]
        questions = np.stack([on_canvas(change.apply(asked)) for change in changes])
        answers = np.tile(on_canvas(right), (WAYS, 1))
        identifiers = [len(names) - WAYS + way for way in range(WAYS)]
        groups.append(Group(questions, answers, identifiers=identifiers, sizes=[1] * WAYS))
        pair = {"input": asked.tolist(), "output": right.tolist()}
        tasks[name] = {"train": [pair], "test": [pair]}
    (folder / "test").mkdir(parents=True)
    write_folder(folder / "test", groups, alphabet=ALPHABET, num_puzzle_identifiers=len(names))
    (folder / "identifiers.json").write_text(json.dumps(names))
    (folder / "test_puzzles.json").write_text(json.dumps(tasks))
    return PuzzleFolder.open(folder / "test")


@pytest.fixture
def arc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PuzzleFolder:
    """The tasks, answered by whatever model as SAID has it."""
    colours = torch.tensor([0, *(colour for said in SAID.values() for colour in said)])
    canvases = torch.from_numpy(np.stack([on_canvas(np.array([[n]], np.uint8)) for n in range(10)])).long()

    def refined(model: Any, inputs: torch.Tensor, identifiers: torch.Tensor) -> Any:
        logits = torch.nn.functional.one_hot(canvases[colours[identifiers]], 12).float()
        yield from [SegmentOutput(logits, -((identifiers - 1) % WAYS).float(), torch.zeros(len(inputs)))] * SEGMENTS

    monkeypatch.setattr(measuring, "refined", refined)
    return write_arc(tmp_path / "arc")


def test_copies_of_arc_tasks_vote_on_one_rank_or_several(arc: PuzzleFolder, tmp_path: Path):
    model = model_for(arc)

    def work() -> Any:
        return measure(model, arc, hrm=HrmConfig(**HRM), at_once=2)

    alone = work()
    assert alone.figures["tasks"] == len(SAID)
    assert alone.figures["pass_at_partial"] == alone.figures["pass_at"]  # each task has one test input
    assert alone.figures["pass_at"] == {"1": 0.25, "2": 0.5, "10": 0.75, "100": 0.75, "1000": 0.75}
    assert "pass@2 0.500" in format_summary(alone.figures)
    assert f"pass@{1:<11}   0.2500   0.2500" in figures_table(alone.figures)
    for world in (2, 3):
        main, *others = on_ranks(world, work, tmp_path / str(world))
        assert main == alone
        assert all("pass_at" not in each.figures and not each.lines for each in others)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run that has learned next to nothing, with the config that names it."""
    from hrm_run import new_hrm_run
    from in_process import train_in

    path = tmp_path_factory.mktemp("home")
    changes = {f"hrm__{name}": value for name, value in HRM.items()}
    cfg, folder = new_hrm_run(path, Path("builtin:sudoku4"), **changes, train__max_steps=2)
    train_in(cfg, folder)
    return folder.path


def words(home: Path, verb: str, *more: str) -> list[str]:
    return [verb, "--config", str(home / "config.resolved.yaml"), "--run", str(home), *more]


@pytest.mark.contract
def test_a_finished_run_is_measured_again_with_the_same_figures(home: Path, capsys: pytest.CaptureFixture[str]):
    assert main(words(home, "eval", "--json")) == 0
    figures = json.loads(capsys.readouterr().out)["after"]
    stored = json.loads((home / "eval" / "after.json").read_text())
    assert stored == figures
    last = json.loads((home / "eval" / "step-2.json").read_text())
    assert {name: last[name] for name in figures} == figures
    lines = (home / "eval" / "after.jsonl").read_text().splitlines()
    assert set(json.loads(lines[0])) == {"row", "prompt", "reference", "prediction", "correct", "halted_after"}
    assert (home / "report.html").is_file()


@pytest.mark.contract
def test_one_puzzle_is_solved_and_its_grid_printed(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    puzzle = tmp_path / "puzzle.txt"
    puzzle.write_text("1..4\n..1.\n.3..\n4..2\n")
    assert main(words(home, "infer", "--in", str(puzzle))) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [len(line) for line in shown if not line.startswith("[")] == [4] * 4
    assert "by its own judgement" in shown[-1]


@pytest.mark.contract
@pytest.mark.parametrize(
    ("text", "code", "said"),
    [("1..4\n..1.\n.3.\n4..2\n", 4, ":3"), (None, 4, "cannot be read"), ("1" * 70_000, 4, "larger")],
)
def test_a_bad_file_is_refused(home: Path, tmp_path: Path, capsys, text: str | None, code: int, said: str):
    puzzle = tmp_path / "puzzle.txt"
    if text is not None:
        puzzle.write_text(text)
    assert main(words(home, "infer", "--in", str(puzzle))) == code
    assert said in capsys.readouterr().err


def test_held_out_puzzles_of_another_kind_are_refused_before_a_run_begins_and_by_a_finished_one(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    other, said = tmp_path / "other", "has 3 puzzle identifiers"  # more than the run has learned
    grid = np.full((2, 16), 2, np.uint8)
    for split in ("train", "test"):
        (other / split).mkdir(parents=True)
        write_folder(other / split, [Group(grid, grid)], alphabet=SUDOKU4, num_puzzle_identifiers=3)
    given = [f"data.val_path={other}", f"output_dir={tmp_path / 'runs'}"]
    for verb in ("plan", "train"):
        assert main([verb, "--config", str(home / "config.resolved.yaml"), *given]) == 4
        shown = capsys.readouterr().err
        assert f"{other / 'test'}: {said}" in shown
        assert "the same kind" in shown
    assert not (tmp_path / "runs").exists()
    assert main([*words(home, "eval", "--split", "test"), f"data.test_path={other}"]) == 4
    assert f"{other / 'test'}: {said}; the run's model has" in capsys.readouterr().err


@pytest.mark.contract
@pytest.mark.parametrize("verb", ["infer-batch", "merge", "merge-test", "export", "serve"])
def test_verbs_for_texts_say_that_the_run_has_learned_puzzles(verb: str, home: Path, tmp_path: Path, capsys):
    more = {"infer-batch": ["--in", str(tmp_path / "in"), "--out", str(tmp_path / "out")]}.get(verb, [])
    assert main(words(home, verb, *more)) == 2
    shown = capsys.readouterr().err
    assert f"task_mode hrm learns puzzles, and {verb} needs a model of texts" in shown
    assert str(home / "model") in shown
