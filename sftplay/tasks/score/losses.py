"""Advantages of two-turn episodes, and the losses of policy and value."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from sftplay.config.run import RunConfig
from sftplay.tasks.score.section import ScoreConfig

Stage = Literal[1, 2]


def compute_turn_returns(
    r1: Tensor, r2: Tensor, *, stage: Stage, alpha: float, turn_discount: float = 0.0
) -> tuple[Tensor | None, Tensor]:
    """Compute the returns of both turns from their verified rewards (Kumar et al. 2024, arXiv 2409.12917, section 5).

    In stage 1 turn 1 has no return, because it has no policy gradient. In stage 2 the second turn gets a bonus of alpha
    for each change of the reward: with alpha 10, the pairs (0, 0), (0, 1), (1, 0) and (1, 1) return 0, 11, -10 and 1.
    The bonus belongs to turn 2 alone. A `turn_discount` above 0 gives turn 1 a share of it, and so punishes turn 1 for
    being right.
    """
    if stage == 1:
        return None, r2
    second = r2 + alpha * (r2 - r1)
    return r1 + turn_discount * second if turn_discount else r1, second


def compute_guide_reward(r1: Tensor, r2: Tensor, *, kind: str, leak: Tensor, leak_penalty: float) -> Tensor:
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
        # Equal returns give advantages of 0, not of nan.
        difference = difference / (torch.std(difference[compared]) + 1e-4)
    return difference.where(compared, 0.0)


MIN_EXPLAINED_VARIANCE = 0.1
"""Share of the variance of a return that V or Q must explain before it is a baseline; below it they are noise."""


class EpisodeRewards(NamedTuple):
    """Rewards and estimates of a batch of episodes: tensors [episodes], fp32, on the CPU.

    `is_known` is 0 where a reward abstained: the episode's numbers mean nothing, and no other episode is compared with
    it. `critic` is Q and V of turn 1, then of turn 2: [4, episodes].
    """

    first: Tensor
    second: Tensor
    is_known: Tensor
    form_first: Tensor
    form_second: Tensor
    leak: Tensor
    value: Tensor | None
    critic: Tensor | None = None


class Advantages(NamedTuple):
    """The advantages of both turns and of the hint, with figures about them.

    From the `returns` of both turns the critic learns. Turn 1 has one in stage 1 too, without a policy gradient.
    """

    first: Tensor | None
    second: Tensor
    guide: Tensor
    figures: dict[str, float | None]
    returns: tuple[Tensor, Tensor]


def compute_advantages(rewards: EpisodeRewards, score: ScoreConfig, *, stage: Stage) -> Advantages:
    """Compute advantages over the episodes of all ranks; the episodes of a problem are adjacent."""
    r1, r2, value, known = rewards.first, rewards.second, rewards.value, rewards.is_known > 0
    first, second = compute_turn_returns(r1, r2, stage=stage, alpha=score.alpha, turn_discount=score.turn_discount)
    undiscounted = r1  # without the share of `turn_discount`: the critic bootstraps turn 2 by itself
    if score.format_reward:
        first = None if first is None else first + score.format_reward * rewards.form_first
        undiscounted = r1 + score.format_reward * rewards.form_first
        second = second + score.format_reward * rewards.form_second
    reward = compute_guide_reward(r1, r2, kind=score.guide_reward, leak=rewards.leak, leak_penalty=score.leak_penalty)
    hint = compute_guide_return(reward, value, value_coef=score.value_coef)

    def subtract(returns: Tensor, baseline: Tensor) -> Tensor:
        return subtract_baseline(returns, baseline, scales=score.scale == "batch", known=rewards.is_known)

    def subtract_mean(returns: Tensor) -> Tensor:
        if score.advantage == "batch":
            return subtract(returns, compute_batch_baseline(returns, rewards.is_known))
        group = score.episodes_per_problem
        return subtract(returns, compute_rloo_baseline(returns, group=group, known=rewards.is_known))

    def explains(estimate: Tensor, target: Tensor) -> bool:
        return compute_explained_variance(estimate[known], target[known]) > MIN_EXPLAINED_VARIANCE

    gains: dict[str, Tensor | None] = {}
    figures: dict[str, float | None] = {"value_is_baseline": 0.0}
    returns = {"t1": first, "t2": second, "guide": hint}
    for name, turn_return in returns.items():
        gains[name] = None if turn_return is None else subtract_mean(turn_return)
    if value is not None and (score.advantage == "value" or (score.advantage == "auto" and explains(value, r2))):
        baseline = compute_shaped_baseline(value, r1, stage=stage, alpha=score.alpha)
        gains["t2"], figures["value_is_baseline"] = subtract(second, baseline), 1.0
    if rewards.critic is not None:
        for name, (q_value, v_value) in zip(("t1", "t2"), rewards.critic.unflatten(0, (2, 2)), strict=True):
            turn_return = returns[name]
            is_baseline = turn_return is not None and explains(q_value, turn_return)
            gains[name] = subtract(q_value, v_value) if is_baseline else gains[name]
            figures[f"critic_is_baseline_{name}"] = float(is_baseline)
    for name, turn_return in returns.items():
        paid, gain = (torch.zeros(0) if values is None else values[known] for values in (turn_return, gains[name]))
        figures[f"return_{name}"] = float(paid.mean()) if len(paid) else None
        for key, values in (("return", paid), ("advantage", gain)):
            figures[f"{key}_{name}_std"] = float(torch.std(values)) if len(values) > 1 else None
    if value is not None and known.any():
        figures["value_mean"] = float(value[known].mean())
        figures["value_loss"] = float((value[known] - r2[known]).square().mean())
        figures["explained_variance"] = compute_explained_variance(value[known], r2[known])
    return Advantages(gains["t1"], gains["t2"], gains["guide"], figures, (undiscounted, second))


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
