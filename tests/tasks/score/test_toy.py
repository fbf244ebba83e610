"""The shipped toy as a user runs it, by the acceptance of toy B in BiLevel SCoRe's specification."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

ROOT = Path(__file__).resolve().parents[3]

pytestmark = [pytest.mark.slow, pytest.mark.long]


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
