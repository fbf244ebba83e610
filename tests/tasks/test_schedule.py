"""The learning rate of each step of a run, beside hand arithmetic."""

from pathlib import Path

import pytest
from in_process import Inputs, train

PEAK = 0.01

# 10 steps: 2 of warm-up, 4 at the peak, 4 of decay by 1 - sqrt(0, 1/4, 2/4, 3/4).
STABLE = [0.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.2928932, 0.1339746]

# 10 steps: 2 of warm-up, then (1 + cos(pi k / 8)) / 2 for k = 0..7.
COSINE = [0.0, 0.5, 1.0, 0.9619398, 0.8535534, 0.6913417, 0.5, 0.3086583, 0.1464466, 0.0380602]


@pytest.mark.parametrize(
    ("schedule", "lowest", "expected"),
    [
        ("warmup_stable_decay", 0.0, STABLE),
        ("warmup_stable_decay", 0.1, [0.1 + 0.9 * share for share in STABLE]),
        # Its warm-up begins at 0: only the way down ends at the lowest rate.
        ("cosine", 0.1, [*COSINE[:2], *(0.1 + 0.9 * share for share in COSINE[2:])]),
    ],
)
def test_the_rates_of_a_runs_steps_are_those_of_hand_arithmetic(
    schedule: str, lowest: float, expected: list[float], inputs: Inputs, tmp_path: Path
):
    run = train(
        tmp_path, inputs, train__max_steps=10, train__learning_rate=PEAK, train__lr_scheduler=schedule,
        train__warmup_ratio=0.2, train__decay_ratio=0.4, train__min_lr_ratio=lowest, train__effective_batch_size=2,
        train__batch_size=2, logging__steps=1,
    )  # fmt: skip
    rates = [line["learning_rate"] for line in run.metrics]
    assert rates == pytest.approx([PEAK * share for share in expected], abs=1e-9)
