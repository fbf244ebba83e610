"""Returns and advantages of the tokens of two-turn episodes."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from sftplay.config.schema.score import ScoreConfig

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


EPSILON = 1e-4
"""Added to the standard deviation: equal returns give advantages of 0, not of nan."""


def batch_baseline(returns: Tensor, known: Tensor | None = None) -> Tensor:
    """The mean of all known returns, for each episode: [episodes]; nan where none is known.

    `known` is 1 where a return is known, [episodes]; all are without it.
    """
    return (returns if known is None else returns[known > 0]).mean().expand_as(returns)


def leave_one_out_baseline(returns: Tensor, *, group: int, known: Tensor | None = None) -> Tensor:
    """The mean known return of the other episodes of the same problem (RLOO): [episodes]; nan where there is none.

    Episodes of a problem stand together, `group` of them. `known` is as for `batch_baseline`.

    >>> leave_one_out_baseline(torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0]), group=3)
    tensor([0.0000, 0.5000, 0.5000, 1.0000, 0.5000, 0.5000])
    """
    counts = torch.ones_like(returns) if known is None else known
    groups, counted = returns.where(counts > 0, 0.0).view(-1, group), counts.view(-1, group)
    others = counted.sum(1, keepdim=True) - counted
    return ((groups.sum(1, keepdim=True) - groups) / others).reshape(-1)


def advantages(returns: Tensor, baseline: Tensor, *, scales: bool, known: Tensor | None = None) -> Tensor:
    """Returns less their baseline; `scales` divides by the standard deviation (of a sample) of all of them.

    An episode without a known return (`known` as for `batch_baseline`), or without a baseline, has no part in the
    deviation, and its advantage is 0.
    """
    difference = returns - baseline.detach()
    compared = ~difference.isnan() if known is None else ~difference.isnan() & (known > 0)
    if scales and compared.sum() > 1:
        difference = difference / (torch.std(difference[compared]) + EPSILON)
    return difference.where(compared, 0.0)


WARM = 0.1
"""Share of the variance of a return that V or Q must explain before it is a baseline: noise would be one otherwise."""


class Outcome(NamedTuple):
    """What is known of a batch of episodes: tensors [episodes], fp32, on the CPU."""

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
    """The advantages of both turns and of the hint, and figures about them."""

    first: Tensor | None
    second: Tensor
    guide: Tensor
    figures: dict[str, float | None]
    paid: tuple[Tensor, Tensor]
    """What both turns pay. The critic learns it for turn 1 in stage 1 too, where that turn has no policy gradient."""


class Baselines:
    """Returns of all ranks' episodes, compared with what was to be expected of them."""

    def __init__(self, outcome: Outcome, score: ScoreConfig, *, stage: Stage) -> None:
        self.outcome, self.score, self.stage = outcome, score, stage

    def plain(self, returns: Tensor) -> Tensor:
        """Compared with the mean of other episodes."""
        known = self.outcome.is_known
        if self.score.advantage == "batch":
            return self._scaled(returns, batch_baseline(returns, known))
        group = self.score.episodes_per_problem
        return self._scaled(returns, leave_one_out_baseline(returns, group=group, known=known))

    def by_value(self, returns: Tensor) -> Tensor | None:
        """Turn 2, compared with V; None where V is no baseline (yet)."""
        value, r1, kind = self.outcome.value, self.outcome.first, self.score.advantage
        if value is None or kind not in ("auto", "value"):
            return None
        if kind == "auto" and self._explained(value, self.outcome.second) <= WARM:
            return None
        return self._scaled(returns, shaped_baseline(value, r1, stage=self.stage, alpha=self.score.alpha))

    def by_critic(self, returns: Tensor, *, turn: Literal[1, 2]) -> Tensor | None:
        """Q - V of a turn; None where there is no critic, or Q explains next to nothing of the returns."""
        if self.outcome.critic is None:
            return None
        worth, expected = self.outcome.critic[2 * turn - 2], self.outcome.critic[2 * turn - 1]
        return self._scaled(worth, expected) if self._explained(worth, returns) > WARM else None

    def _scaled(self, returns: Tensor, baseline: Tensor) -> Tensor:
        return advantages(returns, baseline, scales=self.score.scale == "batch", known=self.outcome.is_known)

    def _explained(self, value: Tensor, target: Tensor) -> float:
        known = self.outcome.is_known > 0
        return explained_variance(value[known], target[known])


def credit_of(outcome: Outcome, score: ScoreConfig, *, stage: Stage) -> Advantages:
    """Advantages over the episodes of all ranks, of which those of a problem stand together."""
    r1, r2, value = outcome.first, outcome.second, outcome.value
    first, second = turn_returns(r1, r2, stage=stage, alpha=score.alpha, turn_discount=score.turn_discount)
    alone = r1  # without what `turn_discount` adds: the critic looks ahead by itself
    if score.format_reward:
        first = None if first is None else first + score.format_reward * outcome.form_first
        alone = r1 + score.format_reward * outcome.form_first
        second = second + score.format_reward * outcome.form_second
    reward = guide_reward(r1, r2, kind=score.guide_reward, leak=outcome.leak, leak_penalty=score.leak_penalty)
    hint = guide_return(reward, value, value_coef=score.value_coef)
    baselines = Baselines(outcome, score, stage=stage)
    by_critic = None if first is None else baselines.by_critic(first, turn=1)
    valued, judged = baselines.by_value(second), baselines.by_critic(second, turn=2)
    gain_first = None if first is None else baselines.plain(first) if by_critic is None else by_critic
    gain_second = next(each for each in (judged, valued, baselines.plain(second)) if each is not None)
    gain_hint = baselines.plain(hint)
    figures: dict[str, float | None] = {"value_is_baseline": float(valued is not None)}
    if outcome.critic is not None:
        is_baseline = {"t1": by_critic is not None, "t2": judged is not None}
        figures |= {f"critic_is_baseline_{turn}": float(each) for turn, each in is_baseline.items()}
    known = outcome.is_known > 0
    for name, returns, gain in (
        ("t1", first, gain_first), ("t2", second, gain_second), ("guide", hint, gain_hint)
    ):  # fmt: skip
        if returns is None or gain is None:
            figures |= dict.fromkeys((f"return_{name}", f"return_{name}_std", f"advantage_{name}_std"))
            continue
        figures |= {f"return_{name}": _mean(returns[known]), f"return_{name}_std": _std(returns[known])}
        figures[f"advantage_{name}_std"] = _std(gain[known])
    told = {} if value is None or not known.any() else _of_value(value[known], r2[known])
    return Advantages(gain_first, gain_second, gain_hint, figures | told, (alone, second))


def _of_value(value: Tensor, r2: Tensor) -> dict[str, float | None]:
    loss = float((value - r2).square().mean())
    return {"value_mean": _mean(value), "value_loss": loss, "explained_variance": explained_variance(value, r2)}


def _mean(values: Tensor) -> float | None:
    return float(values.mean()) if len(values) else None


def _std(values: Tensor) -> float | None:
    return float(torch.std(values)) if len(values) > 1 else None
