"""What an episode pays: the returns of both turns by stage, and the return of the hint. All tensors are [episodes]."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Stage = Literal[1, 2]
GuideReward = Literal["outcome", "progress", "signed"]


class TurnReturns(NamedTuple):
    """What the policy gradient of each turn is paid with."""

    first: Tensor | None
    """None in stage 1: turn 1 has no policy gradient there."""

    second: Tensor


def turn_returns(r1: Tensor, r2: Tensor, *, stage: Stage, alpha: float, turn_discount: float = 0.0) -> TurnReturns:
    """Returns of both turns from their verified rewards (Kumar et al. 2024, arXiv 2409.12917, section 5).

    In stage 2 the second turn is paid a bonus of alpha for each change of the reward: with alpha 10, the pairs (0, 0),
    (0, 1), (1, 0) and (1, 1) pay 0, 11, -10 and 1. The bonus belongs to turn 2 alone. A `turn_discount` above 0 pays
    turn 1 a share of it, and so punishes turn 1 for being right.
    """
    if stage == 1:
        return TurnReturns(None, r2)
    second = r2 + alpha * (r2 - r1)
    return TurnReturns(r1 + turn_discount * second if turn_discount else r1, second)


def guide_reward(r1: Tensor, r2: Tensor, *, kind: GuideReward, leak: Tensor, leak_penalty: float) -> Tensor:
    """What a hint is paid: the second answer's reward (outcome), its progress, or -1 and 1 (signed).

    `leak` is 1 where the hint states the right answer; each costs `leak_penalty`.
    """
    paid = {"outcome": r2, "progress": r2 - r1, "signed": 2 * r2 - 1}[kind]
    return paid - leak_penalty * leak if leak_penalty else paid


def guide_return(reward: Tensor, value: Tensor | None, *, value_coef: float) -> Tensor:
    """The hint's return R_g = r_g + c * V, V detached. With c = 0 it is the reward itself, bit for bit."""
    if value is None or value_coef == 0:
        return reward
    return reward + value_coef * value.detach()


def shaped_baseline(value: Tensor, r1: Tensor, *, stage: Stage, alpha: float) -> Tensor:
    """The expected return of turn 2 where V expects r2: turn 1 is over then, so r1 is known."""
    return value if stage == 1 else (1 + alpha) * value - alpha * r1


def explained_variance(value: Tensor, target: Tensor) -> float:
    """1 - Var(target - value) / Var(target); 0 where the target does not vary, or where there is none."""
    variance = torch.var(target.double(), correction=0) if len(target) else 0.0
    if variance == 0:
        return 0.0
    return float(1 - torch.var((target - value).double(), correction=0) / variance)
