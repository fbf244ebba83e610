"""Which stage a step belongs to, the gate between the stages, and the rate of each part."""

from __future__ import annotations

from dataclasses import dataclass

from sftplay.config.schema.run import RunConfig
from sftplay.config.schema.score import ScoreConfig
from sftplay.tasks.score.learning.returns import Stage

GUIDE_RATES = {"full": 0.1, "lora": 0.2, "qlora": 0.2}
"""Rate of the guide over that of the solver, where nothing is said."""


@dataclass(frozen=True)
class Coefficients:
    """The weights of both KL terms of the solver in a stage."""

    first: float
    second: float


def stage_of(step: int, score: ScoreConfig) -> Stage:
    """The stage of the optimizer step with this number, from 1."""
    return 1 if step <= score.stage1_steps else 2


def kl_coefficients(stage: Stage, score: ScoreConfig) -> Coefficients:
    """beta2 pins turn 1 to the reference in stage 1; everything else has beta1."""
    return Coefficients(score.beta2 if stage == 1 else score.beta1, score.beta1)


def gate_objection(*, kl_first: float, delta: float, kl1_max: float) -> str:
    """Why stage 1 has not done what it is for, when it ends; empty where it has.

    `delta` is how much better the second answers are than the first, on the evaluation's problems.
    """
    faults = []
    if kl_first >= kl1_max:
        faults.append(f"turn 1 has moved from the reference (KL {kl_first:.3g}, score.kl1_max {kl1_max:g})")
    if delta <= 0:
        faults.append(f"second answers are no better than first ones (delta {delta:+.3f})")
    return " and ".join(faults)


def rates_of(cfg: RunConfig, *, peak: float) -> dict[str, float]:
    """The peak rate of each part; `peak` is that of `train.learning_rate`."""
    score = cfg.score
    solver = score.solver_learning_rate or peak
    return {
        "solver": solver,
        "guide": score.guide_learning_rate or GUIDE_RATES[cfg.tuning.mode] * solver,
        "value": score.value_learning_rate,
        "critic": score.critic.learning_rate,
    }
