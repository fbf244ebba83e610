"""The report on a run that answers twice, from planted files: curves of both turns, kinds of hint, episodes to read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sftplay.launch.run_folder import RunFolder
from sftplay.report.remarks import find_remarks
from sftplay.report.report import _tiles, render
from sftplay.report.run_files import RunFiles
from sftplay.tasks.score.report import build_sections


def figures(first: float, second: float, *, fixed: float, broken: float) -> dict[str, Any]:
    return {"n": 4, "acc_t1": first, "acc_t2": second, "delta": second - first, "i2c": fixed, "c2i": broken}


def episode(number: int, *, correct: list[bool]) -> dict[str, Any]:
    return {"row": number, "problem": f"problem {number}", "first": f"first {number}", "hint": "<b>look</b>",
            "second": f"second {number}", "rewards": [0, 1], "correct": correct, "leaks": False}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    (tmp_path / "eval").mkdir()
    (tmp_path / "samples").mkdir()
    (tmp_path / "config.resolved.yaml").write_text("task_mode: score\n")
    (tmp_path / "status.json").write_text('{"state": "done", "step": 20}')
    line = {"step": 10, **figures(0.25, 0.75, fixed=0.5, broken=0.0), "kl_t1": 0.01, "kl_t2": 0.2, "clip_share_t2": 0.1}
    lines = [line, {**line, "step": 20, "i2c": 0.25}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    for step, right in ((0, [[True, True], [True, False]]), (20, [[True, True], [False, True]])):
        measured = figures(0.5, 0.25 if step == 0 else 0.75, fixed=0.0, broken=0.25)
        measured |= {"step": step, "acc_t2_empty": 0.25, "acc_t2_static": 0.5, "diagnosis": f"said at {step}"}
        (tmp_path / "eval" / f"step-{step}.json").write_text(json.dumps(measured))
        rows = [episode(number, correct=each) for number, each in enumerate(right)]
        (tmp_path / "eval" / f"step-{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    hints = {"none": figures(0.5, 0.25, fixed=0, broken=0.25), "model": figures(0.5, 0.75, fixed=0.25, broken=0)}
    after = {**figures(0.5, 0.75, fixed=0.25, broken=0), "diagnosis": "said by eval", "hints": hints}
    (tmp_path / "eval" / "after.json").write_text(json.dumps(after))
    (tmp_path / "samples" / "step-10.jsonl").write_text(json.dumps(episode(0, correct=[True, True])) + "\n")
    return RunFolder(tmp_path)


def test_both_turns_and_both_changes_have_curves_of_what_was_sampled_and_what_was_held_out(folder: RunFolder):
    (section,) = build_sections(RunFiles(folder))
    by_title = {
        chart.title: {curve.key: list(curve.points) for curve in chart.curves} for chart in section.blocks[0][1]
    }
    assert by_title["Right answers"] == {
        "acc_t1": [(10, 0.25), (20, 0.25)],
        "acc_t2": [(10, 0.75), (20, 0.75)],
        "eval_acc_t1": [(0, 0.5), (20, 0.5)],
        "eval_acc_t2": [(0, 0.25), (20, 0.75)],
    }
    changes = by_title["What the second turn changes"]
    assert (changes["i2c"], changes["eval_c2i"]) == ([(10, 0.5), (20, 0.25)], [(0, 0.25), (20, 0.25)])
    assert by_title["Second answers by hint, held out"]["eval_acc_t2_static"] == [(0, 0.5), (20, 0.5)]
    assert list(by_title["KL to the base"]) == ["kl_t1", "kl_t2"]
    assert by_title["Share of tokens whose ratio is cut off"] == {"clip_share_t2": [(10, 0.1), (20, 0.1)]}


def test_tables_have_the_ends_of_the_run_each_kind_of_hint_and_episodes_before_and_after(folder: RunFolder):
    (section,) = build_sections(RunFiles(folder))
    course, ablation, episodes = [
        [[cell.replace("\N{NO-BREAK SPACE}", " ") for cell in row] for row in table.rows]
        for _, table in section.blocks[1:]
    ]
    assert section.blocks[1][1].caption == "At the end: said at 20"
    assert course[1] == ["second answers right", "25.0 %", "75.0 %", "+50.0 points better"]
    assert [row[:4] for row in ablation] == [
        ["this run", "no hint", "50.0 %", "25.0 %"],
        ["this run", "hints of the guide", "50.0 %", "75.0 %"],
    ]
    # the one that turn 2 corrects comes first
    assert episodes == [
        ["problem 1", "0", "✓ first 1", "<b>look</b>", "✗ second 1"],
        ["", "20", "✗ first 1", "<b>look</b>", "✓ second 1"],
        ["problem 0", "0", "✓ first 0", "<b>look</b>", "✓ second 0"],
        ["", "20", "✓ first 0", "<b>look</b>", "✓ second 0"],
    ]


def test_the_page_leads_with_both_turns_and_takes_a_loss_for_nothing(folder: RunFolder):
    lines = [{"step": step, "loss": loss, "acc_t2": 0.5} for step, loss in ((1, 0.1), (2, 0.4), (3, 0.9))]
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = RunFiles(folder)
    tiles = [(name, value.replace("\N{NO-BREAK SPACE}", " ")) for name, value, _ in _tiles(run)]
    assert tiles[:2] == [("Second answers right", "25.0 % → 75.0 %"), ("First answers right", "50.0 % → 50.0 %")]
    assert not any("loss" in name.lower() for name, _ in tiles)
    assert not [text for _, text in find_remarks(run) if "loss" in text]
    page = render(run)
    assert "nats a token" not in page
    assert page.index("Right answers") < page.index("Loss of the update, near 0 by construction")
