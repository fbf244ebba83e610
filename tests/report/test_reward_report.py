"""The report on a run that learns from rewards, from planted files: what it learned and tried, and what is broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sftplay.config.load import load_config
from sftplay.config.resolved import dump_resolved
from sftplay.launch.run_folder import RunFolder
from sftplay.report.chart import draw
from sftplay.report.evaluation import evaluation_blocks
from sftplay.report.figures import compare
from sftplay.report.remarks import find_remarks
from sftplay.report.report import _tiles, draw_curves, render
from sftplay.report.rewards import learned_table, plan, try_blocks
from sftplay.report.run_files import RunFiles

REWARDS = [{"name": "tests", "use": "code_tests"}, {"name": "shape", "use": "syntax", "weight": 0.1}]
N_STEPS = 20


def sample(step: int, n: int) -> dict[str, Any]:
    """Of 4 completions of a step, as many are right as quarters of the run have passed."""
    is_right = n < step * 4 // N_STEPS
    return {
        "prompt_id": n % 2,
        "prompt": f"question {n % 2} <b>",
        "completion": f"answer {n} of step {step}",
        "rewards": {"tests": float(is_right), "shape": 1.0},
        "advantage": 1.0 if is_right else -1.0,
        "verdict": {"status": "ok" if is_right else "wrong", "passed": 3 * is_right, "total": 3},
    }


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    config = tmp_path / "run.yaml"
    values = {"task_mode": "grpo", "model": {"name": "m"}, "data": {"train_path": "t.jsonl"}, "rewards": REWARDS}
    config.write_text(json.dumps(values))
    path = tmp_path / "run"
    (path / "samples").mkdir(parents=True)
    (path / "eval").mkdir()
    (path / "config.resolved.yaml").write_text(dump_resolved(load_config(config)))
    lines = []
    for step in range(1, N_STEPS + 1):
        samples = [sample(step, n) for n in range(4)]
        (path / "samples" / f"step-{step}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in samples))
        mean = sum(each["rewards"]["tests"] for each in samples) / 4
        lines.append({"step": step, "loss": 0.0, "reward": mean + 0.1, "reward/tests": mean, "kl": None})
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step, share in ((0, 0.25), (10, 0.5), (20, 0.75)):
        (path / "eval" / f"step-{step}.json").write_text(
            json.dumps({"step": step, "n": 4, "reward": share, "pass": share, "statuses": {"ok": 4}, "executor": "b"})
        )
        row = {"row": 0, "prompt": "p", "reference": "r", "prediction": f"at {step}", "correct": step > 0}
        (path / "eval" / f"step-{step}.jsonl").write_text(json.dumps(row) + "\n")
    (path / "status.json").write_text(json.dumps({"state": "done", "step": N_STEPS}))
    return RunFolder(path)


@pytest.fixture
def run(folder: RunFolder) -> RunFiles:
    return RunFiles(folder)


def test_the_table_compares_the_first_three_steps_with_the_last_ten(run: RunFiles):
    table = learned_table(run)
    assert table is not None
    rows = {row[0]: row[1:] for row in table.rows}
    # Right of 4: none in steps 1 to 4; in steps 11 to 20 two four times, three five times, four once.
    assert rows["reward"] == ["0.1", "0.775", "+0.675"]
    assert rows["reward/tests"] == ["0", "0.675", "+0.675"]
    assert rows["pass@1, sampled"][:2] == ["0.0\N{NO-BREAK SPACE}%", "67.5\N{NO-BREAK SPACE}%"]
    assert rows["pass@1 of held-out prompts, greedy"][:2] == ["25.0\N{NO-BREAK SPACE}%", "75.0\N{NO-BREAK SPACE}%"]
    assert "kl" not in rows
    assert table.format().splitlines()[0].split() == ["Figure", "First", "Last", "Change"]


def test_the_evaluation_has_a_row_for_each_figure_and_for_nothing_else(run: RunFiles):
    (_, table), *_ = evaluation_blocks(run)
    assert [row[1] for row in table.rows] == ["Prompts answered", "Reward", "Pass@1"]


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("pass", "+50.0 points better"), ("zero_variance_share", "+50.0 points worse"),
        ("clipped_ratio", "+50.0 points worse"), ("follows_hint", "+50.0 points"),
        ("acc_t2_other_hint", "+50.0 points"),
    ],
)  # fmt: skip
def test_a_share_is_judged_only_where_its_direction_is_known(key: str, change: str):
    assert compare(key, 0.25, after=0.75)[2].replace("\u00a0", " ") == change


def test_rewards_have_charts_of_their_own_with_the_held_out_prompts_as_dots(run: RunFiles):
    charts = draw(run, plan(run))
    assert [chart.title for chart in charts] == ["Reward", "Rewards by name", "Share that passes"]
    reward, held_out = charts[0].curves
    assert len(reward.points) == N_STEPS
    assert list(held_out.points) == [(0.0, 0.25), (10.0, 0.5), (20.0, 0.75)]
    others = draw_curves(run, [], drawn={curve.key for chart in charts for curve in chart.curves})
    assert not {curve.key for chart in others for curve in chart.curves} & {"reward", "reward/tests"}


def test_the_page_shows_what_was_tried_and_why_it_was_paid(run: RunFiles):
    _, (_, answers) = try_blocks(run)
    assert [title.split(",")[0] for title, _ in answers] == ["Step 1"] * 2 + ["Step 10"] * 2 + ["Step 20"] * 2
    _, tenth = answers[2]
    assert [name for name, _, _ in tenth] == [
        "Prompt",
        "tests 1, shape 1; ok, 3 of 3 tests. Advantage 1",
        "tests 0, shape 1; wrong, 0 of 3 tests. Advantage -1",
    ]
    assert [verdict for _, verdict, _ in tenth] == [None, True, False]
    page = render(run)
    assert "question 0 &lt;b&gt;" in page
    assert "question 0 <b>" not in page


def test_a_loss_near_0_is_no_warning_but_a_reward_that_does_not_rise_is(folder: RunFolder):
    assert not [text for _, text in find_remarks(RunFiles(folder)) if "loss" in text]
    lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    folder.metrics.write_text("".join(json.dumps({**line, "reward": 0.3}) + "\n" for line in lines))
    texts = [text for _, text in find_remarks(RunFiles(folder))]
    assert "The sampled reward did not rise: 0.3 → 0.3." in texts


def test_the_page_leads_with_held_out_answers_and_the_reward_and_not_with_a_loss(run: RunFiles):
    tiles = _tiles(run)
    assert tiles[:3] == [
        ("Held-out pass@1", "25.0\N{NO-BREAK SPACE}% →\N{NO-BREAK SPACE}75.0\N{NO-BREAK SPACE}%", "on 4 prompts"),
        ("Held-out reward", "0.25 →\N{NO-BREAK SPACE}0.75", "on 4 prompts"),
        ("Sampled reward", "0.1 →\N{NO-BREAK SPACE}1.1", ""),
    ]
    assert not any("loss" in name.lower() for name, _, _ in tiles)
    assert "nats a token" not in render(run)


@pytest.mark.parametrize("junk", ["", "{", "[1]\n", '{"rewards": 7, "advantage": "x", "verdict": []}\n', "\xff\n"])
def test_samples_that_cannot_be_read_are_left_out(folder: RunFolder, junk: str):
    for path in (folder.path / "samples").glob("*.jsonl"):
        path.write_text(junk, encoding="latin-1")
    run = RunFiles(folder)
    assert learned_table(run) is not None
    assert render(run)
