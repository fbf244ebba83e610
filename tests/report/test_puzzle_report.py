"""The report on a run that learns puzzles, from planted files: the refinement curve, ten puzzles with their errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sftplay.launch.run_folder import RunFolder
from sftplay.report.compare import compare_runs
from sftplay.report.report import render
from sftplay.report.run_files import RunFiles
from sftplay.tasks.hrm.report import build_sections


def row(number: int, *, correct: bool) -> dict[str, Any]:
    prediction = "12\n34" if correct else "12\n3<"
    return {"row": number, "prompt": "1.\n..", "reference": "12\n34", "prediction": prediction, "correct": correct,
            "halted_after": 2}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    (tmp_path / "eval").mkdir()
    (tmp_path / "config.resolved.yaml").write_text("task_mode: hrm\n")
    for step, shares in ((100, (0.0, 0.25)), (200, (0.25, 0.5))):
        segments = [
            {"exact_accuracy": share, "accuracy": share + 0.25, "blank_accuracy": share + 0.125} for share in shares
        ]
        figures = {"step": step, "n": 16, "segments": segments, **segments[-1], "pass_at": {"1": 0.5, "2": 0.75},
                   "pass_at_partial": {"1": 0.625},
                   "halting_q": {"exact_accuracy": 0.5, "accuracy": 0.75, "blank_accuracy": 0.75,
                                 "segments": 1.5}}  # fmt: skip
        (tmp_path / "eval" / f"step-{step}.json").write_text(json.dumps(figures))
        rows = [row(number, correct=number >= 3) for number in range(16)]
        (tmp_path / "eval" / f"step-{step}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    return RunFolder(tmp_path)


def find_blocks(folder: RunFolder) -> dict[str, Any]:
    (section,) = build_sections(RunFiles(folder))
    return dict(section.blocks)


def test_the_curve_has_a_point_for_each_segment_and_the_table_both_ways_of_halting(folder: RunFolder):
    shown = find_blocks(folder)
    refined, course = shown["charts"]
    assert [list(curve.points) for curve in refined.curves] == [[(1, 0.0), (2, 0.25)], [(1, 0.25), (2, 0.5)]]
    assert [list(curve.points) for curve in course.curves] == [[(100, 0.25), (200, 0.5)], [(100, 0.375), (200, 0.625)]]
    assert shown["table"].head == ["Segments", "Puzzles right", "Blank cells right", "Cells right, givens too"]
    cells = [[cell.replace("\N{NO-BREAK SPACE}", " ") for cell in line] for line in shown["table"].rows]
    assert cells == [
        ["1", "25.0 %", "37.5 %", "50.0 %"],
        ["2", "50.0 %", "62.5 %", "75.0 %"],
        ["where the model halts, 1.5 on average", "50.0 %", "75.0 %", "75.0 %"],
        ["pass@1, whole tasks", "50.0 %", "", ""],
        ["pass@2, whole tasks", "75.0 %", "", ""],
        ["pass@1, share of a task's inputs", "62.5 %", "", ""],
    ]


def test_ten_puzzles_are_shown_the_wrong_ones_first_with_each_cell_judged(folder: RunFolder):
    shown = find_blocks(folder)
    assert [title for title, _ in shown["grids"]][:4] == [
        "Puzzle 0: 1 of 4 cells wrong; the model would halt after 2",
        "Puzzle 1: 1 of 4 cells wrong; the model would halt after 2",
        "Puzzle 2: 1 of 4 cells wrong; the model would halt after 2",
        "Puzzle 3: solved; the model would halt after 2",
    ]
    assert len(shown["grids"]) == 10
    assert [[kind for kind, _, _ in line] for line in shown["grids"][0][1]] == [["given", "right"], ["right", "wrong"]]


def test_the_page_marks_a_wrong_cell_and_shows_the_right_symbol_without_letting_it_become_markup(folder: RunFolder):
    page = render(RunFiles(folder))
    assert '<td class="wrong"><s>&lt;</s><small>4</small></td>' in page
    assert "Solved after each segment against segment" in page


@pytest.mark.parametrize("content", ['{"row": 1}', '{"prompt": 1, "reference": "1", "prediction": "1"}', "[]", "{",
                                     '{"prompt": "1", "reference": "12", "prediction": "1"}'])  # fmt: skip
def test_a_broken_file_of_answers_leaves_the_curve(folder: RunFolder, content: str):
    (folder.eval / "step-200.jsonl").write_text(content + "\n")
    shown = find_blocks(folder)
    assert not shown["grids"]
    assert len(shown["charts"]) == 2
    assert render(RunFiles(folder))


def test_two_runs_are_compared_by_their_newest_puzzles(folder: RunFolder):
    comparison = compare_runs(folder, folder)
    assert comparison["same_held_out"] is True
    rows = {row["name"]: (row["a"], row["b"]) for row in comparison["training"]}
    newest = {"exact_accuracy": 0.5, "accuracy": 0.75, "blank_accuracy": 0.625}
    assert rows == {"step": (0.0, 0.0), **{f"last held-out {key}": (value, value) for key, value in newest.items()}}
