"""Which stage a step belongs to, and the gate between the stages."""

from __future__ import annotations

from dataclasses import dataclass

from sftplay.config.schema.score import ScoreConfig
from sftplay.tasks.score.learning.returns import Stage


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
