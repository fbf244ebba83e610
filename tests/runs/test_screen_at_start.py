"""What a start says of its automatic choices: one table, each reason once, lines that end at the terminal's edge."""

from __future__ import annotations

from pathlib import Path

from sftplay.config.load import load_config
from sftplay.plan.sizing import Decision, SizedRun
from sftplay.runs.start import decision_lines

CONFIG = Path(__file__).resolve().parents[2] / "configs/run_demo.yaml"
WHY = "largest divisor of 8 within 1024 tokens, beyond which more is no faster"
DECISIONS = {
    "train.precision": Decision("fp32", "no GPU: a CPU computes fp32 fastest"),
    "train.batch_size": Decision(4, WHY),
    "train.grad_accum": Decision(2, WHY),
}


def test_choices_are_one_table_and_a_reason_is_told_once():
    lines = decision_lines(SizedRun(load_config(CONFIG), 1, DECISIONS), width=10_000)
    assert lines == [
        "  train.precision   fp32  no GPU: a CPU computes fp32 fastest",
        f"  train.batch_size  4     {WHY}",
        "  train.grad_accum  2     the same",
    ]
