"""Returns, baselines and advantages of two-turn episodes."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from sftplay.tasks.score.section import ScoreConfig

Stage = Literal[1, 2]
GuideReward = Literal["outcome", "progress", "signed"]


class TurnReturns(NamedTuple):
    """The return of each turn, which its policy gradient uses."""

    first: Tensor | None
    """None in stage 1: turn 1 has no policy gradient there."""

    second: Tensor


def compute_turn_returns(
    r1: Tensor, r2: Tensor, *, stage: Stage, alpha: float, turn_discount: float = 0.0
) -> TurnReturns:
    """Compute the returns of both turns from their verified rewards (Kumar et al. 2024, arXiv 2409.12917, section 5).

    In stage 2 the second turn gets a bonus of alpha for each change of the reward: with alpha 10, the pairs (0, 0),
    (0, 1), (1, 0) and (1, 1) return 0, 11, -10 and 1. The bonus belongs to turn 2 alone. A `turn_discount` above 0
    gives turn 1 a share of it, and so punishes turn 1 for being right.
    """
    if stage == 1:
        return TurnReturns(None, r2)
    second = r2 + alpha * (r2 - r1)
    return TurnReturns(r1 + turn_discount * second if turn_discount else r1, second)


def compute_guide_reward(r1: Tensor, r2: Tensor, *, kind: GuideReward, leak: Tensor, leak_penalty: float) -> Tensor:
    """Compute a hint's reward: the second answer's reward (outcome), its progress, or -1 and 1 (signed).

    `leak` is 1 where the hint states the right answer; a leak costs `leak_penalty`.
    """
    reward = {"outcome": r2, "progress": r2 - r1, "signed": 2 * r2 - 1}[kind]
    return reward - leak_penalty * leak if leak_penalty else reward


def compute_guide_return(reward: Tensor, value: Tensor | None, *, value_coef: float) -> Tensor:
    """Compute the hint's return R_g = r_g + c * V, V detached. With c = 0 it is the reward, bit for bit."""
    if value is None or value_coef == 0:
        return reward
    return reward + value_coef * value.detach()


def compute_shaped_baseline(value: Tensor, r1: Tensor, *, stage: Stage, alpha: float) -> Tensor:
    """Compute the expected return of turn 2 where V expects r2. Turn 1 is over then, so r1 is known."""
    return value if stage == 1 else (1 + alpha) * value - alpha * r1


def compute_explained_variance(value: Tensor, target: Tensor) -> float:
    """Compute 1 - Var(target - value) / Var(target); 0 where the target does not vary, or is empty."""
    variance = torch.var(target.double(), correction=0) if len(target) else 0.0
    if variance == 0:
        return 0.0
    return float(1 - torch.var((target - value).double(), correction=0) / variance)


STD_EPSILON = 1e-4
"""Added to the standard deviation: equal returns give advantages of 0, not of nan."""


def compute_batch_baseline(returns: Tensor, known: Tensor | None = None) -> Tensor:
    """Compute the mean of all known returns, as [episodes]; nan where none is known.

    `known` is 1 where a return is known, [episodes]; None means all are.
    """
    return (returns if known is None else returns[known > 0]).mean().expand_as(returns)


def compute_rloo_baseline(returns: Tensor, *, group: int, known: Tensor | None = None) -> Tensor:
    """Compute the mean known return of the problem's other episodes (RLOO): [episodes]; nan where there is none.

    The `group` episodes of a problem are adjacent. `known` is as for `compute_batch_baseline`.

    >>> compute_rloo_baseline(torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0]), group=3)
    tensor([0.0000, 0.5000, 0.5000, 1.0000, 0.5000, 0.5000])
    """
    counts = torch.ones_like(returns) if known is None else known
    groups, counted = returns.where(counts > 0, 0.0).view(-1, group), counts.view(-1, group)
    others = counted.sum(1, keepdim=True) - counted
    return ((groups.sum(1, keepdim=True) - groups) / others).reshape(-1)


def subtract_baseline(returns: Tensor, baseline: Tensor, *, scales: bool, known: Tensor | None = None) -> Tensor:
    """Subtract the baseline from the returns; `scales` divides by the sample standard deviation of the differences.

    An episode without a known return (`known` as for `compute_batch_baseline`), or without a baseline, does not count
    in the deviation, and its advantage is 0.
    """
    difference = returns - baseline.detach()
    compared = ~difference.isnan() if known is None else ~difference.isnan() & (known > 0)
    if scales and compared.sum() > 1:
        difference = difference / (torch.std(difference[compared]) + STD_EPSILON)
    return difference.where(compared, 0.0)


MIN_EXPLAINED_VARIANCE = 0.1
"""Share of the variance of a return that V or Q must explain before it is a baseline; below it they are noise."""


class EpisodeRewards(NamedTuple):
    """Rewards and estimates of a batch of episodes: tensors [episodes], fp32, on the CPU."""

    first: Tensor
    second: Tensor
    is_known: Tensor
    """0 where a reward abstained: the episode's numbers mean nothing, and no other episode is compared with it."""

    form_first: Tensor
    form_second: Tensor
    leak: Tensor
    value: Tensor | None
    critic: Tensor | None = None
    """Q and V of turn 1, then of turn 2: [4, episodes]."""


class Advantages(NamedTuple):
    """The advantages of both turns and of the hint, with figures about them."""

    first: Tensor | None
    second: Tensor
    guide: Tensor
    figures: dict[str, float | None]
    returns: tuple[Tensor, Tensor]
    """The returns of both turns, from which the critic learns. Turn 1 has one in stage 1 too, without a policy
    gradient."""


class Baselines:
    """Advantages of all ranks' episodes by each kind of baseline."""

    def __init__(self, rewards: EpisodeRewards, score: ScoreConfig, *, stage: Stage) -> None:
        self.rewards, self.score, self.stage = rewards, score, stage

    def subtract_mean(self, returns: Tensor) -> Tensor:
        """Subtract the mean of other episodes."""
        known = self.rewards.is_known
        if self.score.advantage == "batch":
            return self._subtract(returns, compute_batch_baseline(returns, known))
        group = self.score.episodes_per_problem
        return self._subtract(returns, compute_rloo_baseline(returns, group=group, known=known))

    def subtract_value(self, returns: Tensor) -> Tensor | None:
        """Subtract the return that V expects of turn 2; None where V is no baseline (yet)."""
        value, r1, kind = self.rewards.value, self.rewards.first, self.score.advantage
        if value is None or kind not in ("auto", "value"):
            return None
        if kind == "auto" and self._explained_variance(value, self.rewards.second) <= MIN_EXPLAINED_VARIANCE:
            return None
        return self._subtract(returns, compute_shaped_baseline(value, r1, stage=self.stage, alpha=self.score.alpha))

    def subtract_critic(self, returns: Tensor, *, turn: Literal[1, 2]) -> Tensor | None:
        """Compute Q - V of a turn; None where there is no critic, or Q explains next to nothing of the returns."""
        if self.rewards.critic is None:
            return None
        q_value, v_value = self.rewards.critic[2 * turn - 2], self.rewards.critic[2 * turn - 1]
        is_trusted = self._explained_variance(q_value, returns) > MIN_EXPLAINED_VARIANCE
        return self._subtract(q_value, v_value) if is_trusted else None

    def _subtract(self, returns: Tensor, baseline: Tensor) -> Tensor:
        return subtract_baseline(returns, baseline, scales=self.score.scale == "batch", known=self.rewards.is_known)

    def _explained_variance(self, value: Tensor, target: Tensor) -> float:
        known = self.rewards.is_known > 0
        return compute_explained_variance(value[known], target[known])


def compute_advantages(rewards: EpisodeRewards, score: ScoreConfig, *, stage: Stage) -> Advantages:
    """Compute advantages over the episodes of all ranks; the episodes of a problem are adjacent."""
    r1, r2, value = rewards.first, rewards.second, rewards.value
    first, second = compute_turn_returns(r1, r2, stage=stage, alpha=score.alpha, turn_discount=score.turn_discount)
    undiscounted = r1  # without the share of `turn_discount`: the critic bootstraps turn 2 by itself
    if score.format_reward:
        first = None if first is None else first + score.format_reward * rewards.form_first
        undiscounted = r1 + score.format_reward * rewards.form_first
        second = second + score.format_reward * rewards.form_second
    reward = compute_guide_reward(r1, r2, kind=score.guide_reward, leak=rewards.leak, leak_penalty=score.leak_penalty)
    hint = compute_guide_return(reward, value, value_coef=score.value_coef)
    baselines = Baselines(rewards, score, stage=stage)
    critic_first = None if first is None else baselines.subtract_critic(first, turn=1)
    value_second, critic_second = baselines.subtract_value(second), baselines.subtract_critic(second, turn=2)
    gain_first = None if first is None else baselines.subtract_mean(first) if critic_first is None else critic_first
    candidates = (critic_second, value_second, baselines.subtract_mean(second))
    gain_second = next(advantage for advantage in candidates if advantage is not None)
    gain_hint = baselines.subtract_mean(hint)
    figures: dict[str, float | None] = {"value_is_baseline": float(value_second is not None)}
    if rewards.critic is not None:
        is_baseline = {"t1": critic_first is not None, "t2": critic_second is not None}
        figures |= {f"critic_is_baseline_{turn}": float(is_used) for turn, is_used in is_baseline.items()}
    known = rewards.is_known > 0
    for name, returns, gain in (
        ("t1", first, gain_first), ("t2", second, gain_second), ("guide", hint, gain_hint)
    ):  # fmt: skip
        if returns is None or gain is None:
            figures |= dict.fromkeys((f"return_{name}", f"return_{name}_std", f"advantage_{name}_std"))
            continue
        figures |= {f"return_{name}": _mean(returns[known]), f"return_{name}_std": _std(returns[known])}
        figures[f"advantage_{name}_std"] = _std(gain[known])
    if value is not None and known.any():
        known_value, known_r2 = value[known], r2[known]
        figures["value_mean"] = _mean(known_value)
        figures["value_loss"] = float((known_value - known_r2).square().mean())
        figures["explained_variance"] = compute_explained_variance(known_value, known_r2)
    return Advantages(gain_first, gain_second, gain_hint, figures, (undiscounted, second))


def _mean(values: Tensor) -> float | None:
    return float(values.mean()) if len(values) else None


def _std(values: Tensor) -> float | None:
    return float(torch.std(values)) if len(values) > 1 else None
