"""The advantages of one batch of episodes of all ranks: returns, baselines and scale in one place."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sftplay.config.schema.score import ScoreConfig
from sftplay.tasks.score.learning.advantages import advantages, batch_baseline, leave_one_out_baseline
from sftplay.tasks.score.learning.returns import (
    Stage,
    explained_variance,
    guide_return,
    guide_reward,
    shaped_baseline,
    turn_returns,
)

WARM = 0.1
"""Share of the variance of r2 that V must explain before it is a baseline."""


class Outcome(NamedTuple):
    """What is known of a batch of episodes: tensors [episodes], fp32, on the CPU."""

    first: Tensor
    second: Tensor
    is_known: Tensor
    """0 where a reward abstained."""

    form_first: Tensor
    form_second: Tensor
    leak: Tensor
    value: Tensor | None


class Credit(NamedTuple):
    """The advantages of both turns and of the hint, and figures about them."""

    first: Tensor | None
    second: Tensor
    guide: Tensor
    figures: dict[str, float | None]


def credit_of(outcome: Outcome, score: ScoreConfig, *, stage: Stage) -> Credit:
    """Advantages over the episodes of all ranks, of which those of a problem stand together."""
    r1, r2, value = outcome.first, outcome.second, outcome.value
    paid = turn_returns(r1, r2, stage=stage, alpha=score.alpha, turn_discount=score.turn_discount)
    first, second = paid
    if score.format_reward:
        first = None if first is None else first + score.format_reward * outcome.form_first
        second = second + score.format_reward * outcome.form_second
    reward = guide_reward(r1, r2, kind=score.guide_reward, leak=outcome.leak, leak_penalty=score.leak_penalty)
    hint = guide_return(reward, value, value_coef=score.value_coef)
    variance = None if value is None else explained_variance(value, r2)
    is_warm = value is not None and (
        score.advantage == "value" or (score.advantage == "auto" and (variance or 0.0) > WARM)
    )

    def plain(returns: Tensor) -> Tensor:
        if score.advantage == "batch":
            return batch_baseline(returns)
        return leave_one_out_baseline(returns, group=score.episodes_per_problem)

    def gain(returns: Tensor, baseline: Tensor) -> Tensor:
        return advantages(returns, baseline, scales=score.scale == "batch") * outcome.is_known

    assert not is_warm or value is not None
    expected = shaped_baseline(value, r1, stage=stage, alpha=score.alpha) if is_warm and value is not None else None
    gains = {
        "t1": None if first is None else gain(first, plain(first)),
        "t2": gain(second, plain(second) if expected is None else expected),
        "guide": gain(hint, plain(hint)),
    }
    figures: dict[str, float | None] = {"value_is_baseline": float(is_warm)}
    for name, returns in (("t1", first), ("t2", second), ("guide", hint)):
        figures |= {f"return_{name}": _mean(returns), f"return_{name}_std": _std(returns)}
        figures[f"advantage_{name}_std"] = _std(gains[name])
    if value is not None:
        loss = float((value - r2).square().mean())
        figures |= {"value_mean": _mean(value), "value_loss": loss, "explained_variance": variance}
    second_gain, guide_gain = gains["t2"], gains["guide"]
    assert second_gain is not None
    assert guide_gain is not None
    return Credit(gains["t1"], second_gain, guide_gain, figures)


def _mean(values: Tensor | None) -> float | None:
    return None if values is None else float(values.mean())


def _std(values: Tensor | None) -> float | None:
    return None if values is None or len(values) < 2 else float(torch.std(values))
