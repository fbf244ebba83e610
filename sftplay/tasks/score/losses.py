"""The losses of policy and value model, and which episodes make a minibatch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sftplay.config.schema.run import RunConfig
from sftplay.config.schema.score import ScoreConfig
from sftplay.tasks.score.advantages import Stage


def action_log_prob(log_probs: Tensor, mask: Tensor, *, longest: int) -> Tensor:
    """Sum over the action's tokens, divided by the constant `longest`: its own length would reward long ones."""
    return (log_probs * mask).sum(1) / longest


def policy_loss(log_probs: Tensor, mask: Tensor, *, advantage: Tensor, longest: int, n_episodes: float) -> Tensor:
    """-sum(A * lp) / n_episodes, the share of these episodes in the mean of a batch of `n_episodes` (REINFORCE)."""
    return -(advantage.detach() * action_log_prob(log_probs, mask, longest=longest)).sum() / n_episodes


class Clipped(NamedTuple):
    """A policy loss by ratios, and what it was made of, [episodes, tokens]."""

    loss: Tensor
    ratio: Tensor
    is_cut: Tensor
    """1 where the ratio was cut off, so that the token teaches nothing."""


def clipped_loss(
    log_probs: Tensor,
    mask: Tensor,
    *,
    sampled: Tensor,
    advantage: Tensor,
    epsilon: float,
    longest: int,
    n_episodes: float,
) -> Clipped:
    """As `policy_loss`, with min(rho A, clip(rho, 1 - epsilon, 1 + epsilon) A) of each token in place of A log p.

    `sampled` are the log-probabilities with which the tokens were drawn, and rho is exp(log p - sampled) (Schulman et
    al. 2017, arXiv 1707.06347, equation 7). Where rho is 1, the gradient is that of `policy_loss`.
    """
    gain, ratio = advantage.detach()[:, None], (log_probs - sampled.detach()).exp()
    bounded = ratio.clamp(1 - epsilon, 1 + epsilon)
    loss = -action_log_prob(torch.minimum(ratio * gain, bounded * gain), mask, longest=longest).sum() / n_episodes
    is_cut = ((ratio > 1 + epsilon) & (gain > 0)) | ((ratio < 1 - epsilon) & (gain < 0))
    return Clipped(loss, ratio.detach(), is_cut.to(mask.dtype))


def full_kl(log_probs: Tensor, reference: Tensor) -> Tensor:
    """KL(policy || reference) at each position, over the whole vocabulary: [..., vocabulary] -> [...]."""
    return (log_probs.exp() * (log_probs - reference)).sum(-1)


def k3_kl(log_probs: Tensor, reference: Tensor, *, sampled: Tensor) -> Tensor:
    """An estimate of the same by the sampled tokens alone: ratio * (exp(d) - d - 1), d = reference - policy.

    `sampled` are the log-probabilities with which the tokens were drawn. The ratio policy / sampled is 1 at first; its
    gradient makes that of the estimate right (Schulman, "Approximating KL divergence"; DeepSeek-V3.2, section 3.1).
    """
    difference = reference - log_probs
    return (log_probs - sampled.detach()).exp() * (difference.exp() - difference - 1)


def masked_mean(values: Tensor, mask: Tensor, *, n_tokens: float) -> Tensor:
    """The share of these tokens in the mean over a batch of `n_tokens` action tokens."""
    return (values * mask).sum() / max(n_tokens, 1)


def entropy(log_probs: Tensor) -> Tensor:
    """Of each position, in nats: [..., vocabulary] -> [...]."""
    return -(log_probs.exp() * log_probs).sum(-1)


def chosen(log_probs: Tensor, tokens: Tensor) -> Tensor:
    """Those of the tokens: [..., vocabulary], int64 [...] -> [...]."""
    return torch.gather(log_probs, -1, tokens.unsqueeze(-1)).squeeze(-1)


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
