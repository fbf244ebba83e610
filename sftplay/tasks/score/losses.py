"""Policy losses, KL estimates, and the coefficients and learning rates of both stages."""

from __future__ import annotations

import torch
from torch import Tensor

from sftplay.config.run import RunConfig
from sftplay.tasks.score.advantages import Stage
from sftplay.tasks.score.section import ScoreConfig


def sum_log_probs(log_probs: Tensor, mask: Tensor, *, longest: int) -> Tensor:
    """Sum over the action's tokens, divided by the constant `longest`: the action's length would reward long ones."""
    return (log_probs * mask).sum(1) / longest


def policy_loss(log_probs: Tensor, mask: Tensor, *, advantage: Tensor, longest: int, n_episodes: float) -> Tensor:
    """Return -sum(A * lp) / n_episodes: these episodes' share of the mean over `n_episodes` (REINFORCE)."""
    return -(advantage.detach() * sum_log_probs(log_probs, mask, longest=longest)).sum() / n_episodes


def clipped_loss(
    log_probs: Tensor,
    mask: Tensor,
    *,
    sampled: Tensor,
    advantage: Tensor,
    epsilon: float,
    longest: int,
    n_episodes: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return PPO's clipped loss: `policy_loss` with min(rho A, clip(rho, 1 - epsilon, 1 + epsilon) A) for A log p.

    `sampled` are the log-probabilities at sampling time, and rho is exp(log p - sampled) (Schulman et al. 2017, arXiv
    1707.06347, equation 7). Where rho is 1, the gradient is that of `policy_loss`. Return also the ratios rho and, as
    0 or 1, whether a ratio was clipped, so that the token has no gradient: both [episodes, tokens].
    """
    gain, ratio = advantage.detach()[:, None], (log_probs - sampled.detach()).exp()
    bounded = ratio.clamp(1 - epsilon, 1 + epsilon)
    loss = -sum_log_probs(torch.minimum(ratio * gain, bounded * gain), mask, longest=longest).sum() / n_episodes
    is_clipped = ((ratio > 1 + epsilon) & (gain > 0)) | ((ratio < 1 - epsilon) & (gain < 0))
    return loss, ratio.detach(), is_clipped.to(mask.dtype)


def full_kl(log_probs: Tensor, reference: Tensor) -> Tensor:
    """Compute KL(policy || reference) at each position, over the vocabulary: [..., vocabulary] -> [...]."""
    return (log_probs.exp() * (log_probs - reference)).sum(-1)


def k3_kl(log_probs: Tensor, reference: Tensor, *, sampled: Tensor) -> Tensor:
    """Estimate KL by the sampled tokens alone: ratio * (exp(d) - d - 1), d = reference - policy.

    `sampled` are the log-probabilities at sampling time. The ratio policy / sampled is 1 at first; with it the
    gradient of the estimate is unbiased (Schulman, "Approximating KL divergence"; DeepSeek-V3.2, section 3.1).
    """
    difference = reference - log_probs
    return (log_probs - sampled.detach()).exp() * (difference.exp() - difference - 1)


def masked_mean(values: Tensor, mask: Tensor, *, n_tokens: float) -> Tensor:
    """Return these tokens' share of the mean over a batch of `n_tokens` action tokens."""
    return (values * mask).sum() / max(n_tokens, 1)


def entropy(log_probs: Tensor) -> Tensor:
    """Compute the entropy at each position, in nats: [..., vocabulary] -> [...]."""
    return -(log_probs.exp() * log_probs).sum(-1)


def gather_log_probs(log_probs: Tensor, tokens: Tensor) -> Tensor:
    """Select the log-probabilities of the tokens: [..., vocabulary], int64 [...] -> [...]."""
    return torch.gather(log_probs, -1, tokens.unsqueeze(-1)).squeeze(-1)


def find_stage(step: int, score: ScoreConfig) -> Stage:
    """Return the stage of an optimizer step; steps count from 1."""
    return 1 if step <= score.stage1_steps else 2


def choose_kl_coefficients(stage: Stage, score: ScoreConfig) -> dict[str, float]:
    """Choose the weights of the KL terms. In stage 1, beta2 pins turn 1 to the reference."""
    return {"t1": score.beta2 if stage == 1 else score.beta1, "t2": score.beta1, "guide": score.beta_guide}


def find_learning_rates(cfg: RunConfig, *, peak: float) -> dict[str, float]:
    """Return the peak learning rate of each part; `peak` is that of `train.learning_rate`."""
    score = cfg.score
    solver = score.solver_learning_rate or peak
    return {
        "solver": solver,
        "guide": score.guide_learning_rate or {"full": 0.1, "lora": 0.2, "qlora": 0.2}[cfg.tuning.mode] * solver,
        "value": score.value_learning_rate,
        "critic": score.critic.learning_rate,
    }
