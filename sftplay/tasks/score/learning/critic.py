"""The optional critic (ArCHer, Zhou et al. 2024, arXiv 2402.19446): what a turn's answer is worth, and what a state is.

Two turns are a decision process of two steps: (s1, y1, R1), then (s2, y2, R2) and the end. The hint belongs to the
solver's surroundings: it is part of s2.
"""

from __future__ import annotations

from copy import deepcopy
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sftplay.tasks.score.learning.encoder import TextEncoder, Tokens


class Visits(NamedTuple):
    """One turn of all episodes: the state, the answer that was given, and one that the solver has drawn afresh."""

    state: Tokens
    answer: Tokens
    fresh_answer: Tokens


class Critic(nn.Module):
    """Twin Q(s, a) and twin V(s); the smaller of two estimates counts, because the larger one is too hopeful."""

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.encoder = TextEncoder(vocab_size, width)
        self.q_heads = nn.ModuleList(_head(2 * width, width) for _ in range(2))
        self.v_heads = nn.ModuleList(_head(width, width) for _ in range(2))

    def q_values(self, state: Tokens, answer: Tokens) -> Tensor:
        """Both estimates of what an answer is worth: [2, episodes]."""
        both = torch.cat([self.encoder(state), self.encoder(answer)], -1)
        return torch.stack([head(both).squeeze(-1) for head in self.q_heads])

    def v_values(self, state: Tokens) -> Tensor:
        """Both estimates of what a state is worth: [2, episodes]."""
        encoded = self.encoder(state)
        return torch.stack([head(encoded).squeeze(-1) for head in self.v_heads])


def _head(inputs: int, width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, 1))


def slow_copy(critic: Critic) -> Critic:
    """An exact copy that no optimizer gets."""
    return deepcopy(critic).requires_grad_(False)


@torch.no_grad()
def soft_update(slow: nn.Module, critic: nn.Module, *, tau: float) -> None:
    """slow <- (1 - tau) * slow + tau * critic, in place, a tensor at a time; buffers are copied.

    The slow copy may lie on another device: one tensor at a time is sent there.
    """
    for mine, its in zip(slow.parameters(), critic.parameters(), strict=True):
        mine.lerp_(its.detach().to(mine.device), tau)
    for mine, its in zip(slow.buffers(), critic.buffers(), strict=True):
        mine.copy_(its)


def critic_loss(
    critic: Critic,
    slow: Critic,
    *,
    turns: tuple[Visits, Visits],
    returns: tuple[Tensor, Tensor],
    weight: Tensor,
    discount: float,
    n_episodes: float,
) -> dict[str, Tensor]:
    """The four squared errors: Q(s1, y1) <- R1 + discount * min V'(s2), Q(s2, y2) <- R2, V(s) <- min Q'(s, fresh).

    V' and Q' are those of the slow copy. Each error is the share of these episodes in the mean over twins and a batch
    of `n_episodes`; `weight` [episodes] is 0 where nothing is to be learned. It and `returns` lie where the critic
    does; the slow copy may lie elsewhere.
    """
    first, second = turns
    with torch.no_grad():
        ahead = slow.v_values(second.state).min(0).values
        targets = {
            "q1": returns[0] + discount * ahead.to(returns[0].device),
            "q2": returns[1],
            "v1": slow.q_values(first.state, first.fresh_answer).min(0).values,
            "v2": slow.q_values(second.state, second.fresh_answer).min(0).values,
        }
    estimates = {
        "q1": critic.q_values(first.state, first.answer),
        "q2": critic.q_values(second.state, second.answer),
        "v1": critic.v_values(first.state),
        "v2": critic.v_values(second.state),
    }
    return {
        name: ((estimates[name] - target.to(weight.device)).square().mean(0) * weight).sum() / n_episodes
        for name, target in targets.items()
    }


@torch.no_grad()
def opinion(critic: Critic, turn: Visits) -> tuple[Tensor, Tensor]:
    """min Q(s, y) and min V(s), each [episodes]: what the answer is worth, and what was expected of the state."""
    return critic.q_values(turn.state, turn.answer).min(0).values, critic.v_values(turn.state).min(0).values
