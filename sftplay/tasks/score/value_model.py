"""The value model V and the optional critic: encoder, heads, losses and the target network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from sftplay.tasks.score.section import SEPARATE_WIDTH


class PaddedTokens(NamedTuple):
    """Texts as int64 [episodes, tokens], padded on the right, and their lengths, int64 [episodes]."""

    ids: Tensor
    lengths: Tensor

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[int]], device: Any = "cpu") -> PaddedTokens:
        """Pad rows of ids; none may be empty. The network never reads the padding."""
        lengths = torch.tensor([len(row) for row in rows])
        ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
        return cls(ids.to(device), lengths.to(device))


class TextEncoder(nn.Module):
    """Encode token ids as one vector for each text, with a small recurrent network."""

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.recurrent = nn.GRU(width, width, batch_first=True)

    def forward(self, tokens: PaddedTokens) -> Tensor:
        """Return the state after the last token, [episodes, width], on the network's device."""
        ids, lengths = (tensor.to(self.embedding.weight.device) for tensor in tokens)
        states, _ = self.recurrent(self.embedding(ids))
        last: Tensor = states[torch.arange(len(states), device=states.device), lengths - 1]
        return last


ValueFlow = Literal["shared_trunk", "stop", "straight_through"]


class ValueHead(nn.Module):
    """A linear layer on the guide's state, in fp32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map states [..., width] to values [...] between 0 and 1."""
        value: Tensor = torch.sigmoid(self.linear(hidden.float().to(self.linear.weight.device)).squeeze(-1))
        return value


class SeparateValue(nn.Module):
    """A small recurrent network over token ids, with a value head."""

    def __init__(self, vocab_size: int, width: int = SEPARATE_WIDTH) -> None:
        super().__init__()
        self.encoder, self.head = TextEncoder(vocab_size, width), ValueHead(width)

    def forward(self, tokens: PaddedTokens) -> Tensor:
        """Return values between 0 and 1, [episodes]."""
        value: Tensor = self.head(self.encoder(tokens))
        return value


def value_loss(
    value: nn.Module,
    seen: Tensor | PaddedTokens,
    *,
    target: Tensor,
    flow: ValueFlow,
    value_coef: float,
    n_episodes: float,
) -> Tensor | None:
    """Return these episodes' share of the mean squared error of V, weighted as `flow` says; None where the weight is 0.

    `seen` is the input of V: the guide's states [episodes, width], or tokens. shared_trunk: weight `value_coef`, and
    the gradient reaches the guide through its states. stop and straight_through: weight 1, for V alone. A nan target
    is unknown: V learns nothing from it.
    """
    weight = value_coef if flow == "shared_trunk" else 1.0
    if weight == 0:
        return None
    values = value(seen.detach() if isinstance(seen, Tensor) and flow != "shared_trunk" else seen)
    target = target.to(values.device)
    error: Tensor = (values - target.where(~target.isnan(), values.detach())).square().sum()
    return weight * error / n_episodes


def straight_through(log_probs: Tensor, tokens: Tensor, *, embedding: Tensor) -> Tensor:
    """Return embeddings of sampled tokens with the gradient of the expected embedding (straight-through estimator).

    log_probs [..., vocabulary], tokens int64 [...], embedding [vocabulary, width] -> [..., width]. The values are the
    embeddings of the tokens; the gradient flows as if each token were the mixture that it was sampled from (biased).
    """
    probabilities = log_probs.exp()
    one_hot = torch.nn.functional.one_hot(tokens, log_probs.shape[-1]).to(probabilities.dtype)
    return (one_hot + probabilities - probabilities.detach()) @ embedding.detach().to(probabilities.dtype)


class CriticInputs(NamedTuple):
    """One turn of all episodes: the state, the answer of the episode, and a second sample of the solver."""

    state: PaddedTokens
    answer: PaddedTokens
    resampled_answer: PaddedTokens


class Critic(nn.Module):
    """Twin Q(s, a) and twin V(s). The smaller estimate of each pair counts, because the larger one overestimates."""

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.encoder = TextEncoder(vocab_size, width)
        self.q_heads, self.v_heads = (
            nn.ModuleList(nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, 1)) for _ in range(2))
            for inputs in (2 * width, width)
        )

    def q_values(self, state: PaddedTokens, answer: PaddedTokens) -> Tensor:
        """Estimate the return of an answer twice: [2, episodes]."""
        encoded = torch.cat([self.encoder(state), self.encoder(answer)], -1)
        return torch.stack([head(encoded).squeeze(-1) for head in self.q_heads])

    def v_values(self, state: PaddedTokens) -> Tensor:
        """Estimate the return of a state twice: [2, episodes]."""
        encoded = self.encoder(state)
        return torch.stack([head(encoded).squeeze(-1) for head in self.v_heads])


@torch.no_grad()
def soft_update(target_critic: nn.Module, critic: nn.Module, *, tau: float) -> None:
    """Update target <- (1 - tau) * target + tau * critic in place, a tensor at a time; copy buffers.

    The target critic may lie on another device: one tensor at a time is sent there.
    """
    for target, online in zip(target_critic.parameters(), critic.parameters(), strict=True):
        target.lerp_(online.detach().to(target.device), tau)
    for target, online in zip(target_critic.buffers(), critic.buffers(), strict=True):
        target.copy_(online)


def critic_loss(
    critic: Critic,
    target_critic: Critic,
    *,
    turns: tuple[CriticInputs, CriticInputs],
    returns: tuple[Tensor, Tensor],
    weight: Tensor,
    discount: float,
    n_episodes: float,
) -> dict[str, Tensor]:
    """Return four squared errors: Q(s1, y1) <- R1 + discount * min V'(s2), Q(s2, y2) <- R2, V(s) <- min Q'(s, y').

    V' and Q' are estimates of the target critic, and y' is the resampled answer. Each error is the share of these
    episodes in the mean over twins and a batch of `n_episodes`; `weight` [episodes] is 0 where nothing is learned.
    `weight` and `returns` lie on the critic's device; the target critic may lie on another one.
    """
    first, second = turns
    with torch.no_grad():
        next_value = target_critic.v_values(second.state).min(0).values
        targets = {
            "q1": returns[0] + discount * next_value.to(returns[0].device),
            "q2": returns[1],
            "v1": target_critic.q_values(first.state, first.resampled_answer).min(0).values,
            "v2": target_critic.q_values(second.state, second.resampled_answer).min(0).values,
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
def estimate_values(critic: Critic, turn: CriticInputs) -> tuple[Tensor, Tensor]:
    """Return min Q(s, y) and min V(s), both [episodes]: the answer's expected return, and the state's."""
    return critic.q_values(turn.state, turn.answer).min(0).values, critic.v_values(turn.state).min(0).values
