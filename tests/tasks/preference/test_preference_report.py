"""The report of a run of preferences, from the files that such a run leaves."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sftplay.launch.run_folder import RunFolder
from sftplay.report.figures import capitalized
from sftplay.report.report import render
from sftplay.report.run_files import RunFiles
from sftplay.tasks.preference.report import build_sections, tabulate_gate, tabulate_pairs

FIGURES = {"n": 40, "loss": 0.69, "accuracy": 0.5, "stderr": 0.079, "margin": 0.0, "logps/chosen": -5.0,
           "logps/rejected": -6.0, "tokens/chosen": 7.0, "tokens/rejected": 9.0}  # fmt: skip
GATE = {
    "pairs": 90, "equal": 3, "white_space_only": 1, "swapped": 2, "duplicates": 4, "contaminated": 5,
    "longer_is_better_accuracy": 0.91, "share_chosen_longer": 0.9,
    "deciding": [{"feature": "has a list", "accuracy": 0.83}],
    "margins": {"edges": [0.0, 1.0, 2.0], "counts": [60, 30]},
}  # fmt: skip


def line(row: int, *, margin: float, prediction: str) -> dict[str, Any]:
    return {"row": row, "prompt": f"question {row}", "reference": f"good {row}", "rejected": f"bad {row}",
            "margin": margin, "prediction": prediction, "prediction_tokens": len(prediction)}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> RunFiles:
    folder = tmp_path / "outputs" / "liked"
    (folder / "eval").mkdir(parents=True)
    (folder / "config.resolved.yaml").write_text("task_mode: dpo\n")
    (folder / "data_report.json").write_text(json.dumps({"read": 100, "kept": 90, "preference": GATE}))
    metrics = [{"step": n, "rewards/chosen": 0.1 * n, "rewards/rejected": -0.1 * n, "rewards/margins": 0.2 * n,
                "rewards/accuracies": 0.5 + 0.1 * n, "logps/chosen": -5.0, "logps/rejected": -6.0 - n, "kl": -n / 2,
                "loss": 0.7 - 0.1 * n} for n in range(1, 5)]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in metrics))
    after = FIGURES | {"accuracy": 0.95, "margin": 1.5, "stderr": 0.034}
    for name, figures in (("before", FIGURES), ("after", after), ("step-2", FIGURES | {"accuracy": 0.7})):
        (folder / "eval" / f"{name}.json").write_text(json.dumps(figures))
    for name, sign, words in (("before", 0.0, "<b>long</b> answer"), ("after", 1.0, "short")):
        lines = [line(row, margin=sign * (row - 3), prediction=words) for row in range(40)]
        (folder / "eval" / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    return RunFiles(RunFolder(folder))


def test_both_sides_pairs_and_answers_before_and_after_are_on_the_page(run: RunFiles):
    (sides, gate) = build_sections(run)
    charts = sides.blocks[0][1]
    assert [chart.title for chart in charts] == [
        "Rewards of both sides", "Margin", "Pairs right", "Log-probabilities of both sides",
        "Difference to the reference",
        "Tokens of both sides",
    ]  # fmt: skip
    figures, pairs, answers = (content for kind, content in sides.blocks if kind == "table")
    assert figures.rows[0][1:3] == ["50.0\u00a0%", "95.0\u00a0%"]
    assert "3.4 points" in figures.caption
    assert len(pairs) == 10
    margins = [float(row[-1]) for row in pairs.rows]
    assert (margins[0], margins[-1]) == (36.0, -3.0)
    assert margins == sorted(margins, reverse=True)
    assert {row[-2] for row in pairs.rows} <= {"+0.000", "-0.000"}
    assert answers.rows[0][1:] == ["<b>long</b> answer", "18", "short", "5"]
    page = render(run)
    assert "<b>long</b>" not in page
    assert re.search(r'id="preferences".*id="gate"', page, re.DOTALL)
    assert gate.title == "What the pairs teach besides"


def test_the_gate_of_the_data_report_is_shown_with_what_decides_labels_alone():
    counts, deciding, margins = (content for _, content in tabulate_gate(GATE))
    shown = dict(counts.rows)
    assert shown["pairs with equal sides, left out"] == "3"
    assert shown["labels that length alone gets right"] == "0.91"
    assert deciding.rows == [["has a list", "0.83"]]
    assert margins.rows == [["0 to 1", "60"], ["1 to 2", "30"]]


def test_a_run_that_has_measured_nothing_and_broken_files_have_a_page(tmp_path: Path):
    folder = tmp_path / "outputs" / "new"
    (folder / "eval").mkdir(parents=True)
    (folder / "config.resolved.yaml").write_text("task_mode: kto\n")
    assert "new" in render(RunFiles(RunFolder(folder)))
    (folder / "data_report.json").write_text(json.dumps({"preference": {"deciding": 3, "margins": {"edges": [1]}}}))
    (folder / "eval" / "after.json").write_text(json.dumps({"accuracy": "x", "n": None}))
    (folder / "eval" / "after.jsonl").write_text('{"row": 1, "margin": "x"}\nnull\n')
    assert "new" in render(RunFiles(RunFolder(folder)))


def test_the_loss_of_pairs_is_not_said_to_be_one_of_tokens(run: RunFiles):
    page = render(run)
    assert "mean of a row" in page
    assert "nats a token" not in page


def test_answers_with_a_verdict_stand_under_it_with_their_rewards():
    wanted = {"row": 0, "prompt": "Why?", "desirable": True, "reference": "Since.", "rewards": [0.25]}
    unwanted = {"row": 1, "prompt": "How?", "desirable": False, "rejected": "So.", "rewards": [0.5]}
    table = tabulate_pairs([wanted | {"rewards": [0.0]}], [wanted, unwanted])
    assert table.head == ["Prompt", "Wanted", "Not wanted", "Reward before", "Reward after"]
    assert table.rows == [["How?", "", "So.", "–", "+0.500"], ["Why?", "Since.", "", "+0.000", "+0.250"]]
    kinds = [row[0] for row in tabulate_gate({"pairs": 0, "desirable": 1, "undesirable": 1})[0][1].rows]
    assert kinds == ["wanted answers", "unwanted answers"]


def test_scores_are_no_answers_and_a_key_keeps_its_letters(tmp_path: Path):
    folder = tmp_path / "outputs" / "score"
    (folder / "eval").mkdir(parents=True)
    (folder / "config.resolved.yaml").write_text("task_mode: reward_model\n")
    line = {"row": 0, "prompt": "Why?", "chosen": "Since.", "rejected": "So.", "scores": [1.0, 0.0], "correct": True}
    (folder / "eval" / "after.jsonl").write_text(json.dumps(line) + "\n")
    page = render(RunFiles(RunFolder(folder)))
    assert "Exact match" not in page
    assert "(empty)" not in page
    assert capitalized("train.epochs 3: long") == "train.epochs 3: long"
    assert capitalized("few rows") == "Few rows"
