"""The shipped toys as a user runs them: toy B of BiLevel SCoRe's specification, and one where a hint is no answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.slow

STEPS = 24
"""Of the 100: 18 of 20 second answers are right after 20, and 19 after 40."""


def play_steps(run_sftplay: Callable[..., CompletedProcess[str]], folder: Path, *values: str) -> list[dict[str, Any]]:
    """The evaluations of configs/run_score_steps.yaml, the first and the last one."""
    config = ROOT / "configs" / "run_score_steps.yaml"
    done = run_sftplay("train", "--config", config, f"output_dir={folder}", "run_name=steps", *values, timeout=20 * 60)
    assert done.returncode == 0, done.stderr
    paths = sorted((folder / "steps" / "eval").glob("step-*.json"), key=lambda path: int(path.stem[5:]))
    return [json.loads(paths[at].read_text()) for at in (0, -1)]


def check_corrected(start: dict[str, Any], end: dict[str, Any]) -> None:
    """Second answers to problems that nothing was trained on become right, by hints that are no answers."""
    assert end["follows_hint"] == end["hint_leak"] == 0
    assert start["delta"] <= 0.2
    assert end["delta"] >= 0.4
    assert abs(end["acc_t1"] - start["acc_t1"]) <= 0.06  # two samples of 1000 episodes
    assert end["i2c"] >= 5 * end["c2i"]
    assert end["acc_t2_empty"] <= end["acc_t2"] - 0.3
    assert end["diagnosis"] == "turn 2 corrects the first answer"


def test_hints_that_are_no_answers_make_second_answers_to_unseen_problems_right(
    tmp_path: Path, sftplay: Callable[..., CompletedProcess[str]]
):
    steps = (f"{key}={STEPS}" for key in ("score.stage1_steps", "train.eval_steps", "train.save_steps"))
    check_corrected(*play_steps(sftplay, tmp_path, *steps))


@pytest.mark.long
@pytest.mark.parametrize("seed", [42, 1, 2])
def test_stage_1_teaches_turn_2_alone_and_stage_2_teaches_both(
    seed: int, tmp_path: Path, sftplay: Callable[..., CompletedProcess[str]]
):
    done = sftplay(
        "train", "--config", ROOT / "configs" / "run_score_toy.yaml", f"output_dir={tmp_path}", "run_name=toy",
        f"seed={seed}", "score.stage2_steps=50", timeout=15 * 60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = tmp_path / "toy"
    start, first, second = (
        json.loads((run / "eval" / f"step-{step}.json").read_text()) for step in (0, 100, 150)
    )  # fmt: skip
    lines = {line["step"]: line for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())}
    assert abs(first["acc_t1"] - start["acc_t1"]) <= 0.05
    assert lines[100]["kl_t1"] <= 0.02
    assert first["acc_t2"] >= 0.9
    assert first["i2c"] >= 5 * first["c2i"]
    assert first["acc_t2_empty"] <= first["acc_t1"] + 0.05  # the guide matters
    assert first["diagnosis"] == "turn 2 follows the hint: it is the answer"
    assert first["follows_hint"] >= 0.9
    assert first["acc_t2_other_hint"] <= 0.2  # a wrong hint is followed as well
    assert second["acc_t1"] >= first["acc_t1"] + 0.3
    # Not below it, within what 1000 sampled episodes tell: with seed 2 both are above 0.99.
    assert second["acc_t2"] >= second["acc_t1"] - 0.01
