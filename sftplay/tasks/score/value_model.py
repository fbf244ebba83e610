"""The value model: what it reads, its head, and its weights."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from sftplay.config.schema.score import SEPARATE_WIDTH


class Tokens(NamedTuple):
    """Texts as int64 [episodes, tokens], padded on the right, and how long each is, int64 [episodes]."""

    ids: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], device: Any = "cpu") -> Tokens:
        """Rows of ids, none of them empty. What stands behind a row's end is never looked at."""
        lengths = torch.tensor([len(row) for row in rows])
        ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
        for n, row in enumerate(rows):
            ids[n, : len(row)] = torch.tensor(row)
        return cls(ids.to(device), lengths.to(device))


class TextEncoder(nn.Module):
    """Token ids to one vector a text, by a small recurrent network of its own."""

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.recurrent = nn.GRU(width, width, batch_first=True)

    def forward(self, tokens: Tokens) -> Tensor:
        """[episodes, width]: the state after the last token, where the network lies."""
        ids, lengths = (each.to(self.embedding.weight.device) for each in tokens)
        states, _ = self.recurrent(self.embedding(ids))
        last: Tensor = states[torch.arange(len(states), device=states.device), lengths - 1]
        return last


ValueFlow = Literal["shared_trunk", "stop", "straight_through"]


class ValueHead(nn.Module):
    """One linear layer on the guide's state, in fp32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., width] -> [...], between 0 and 1."""
        value: Tensor = torch.sigmoid(self.linear(hidden.float().to(self.linear.weight.device)).squeeze(-1))
        return value


class SeparateValue(nn.Module):
    """A small recurrent network over token ids, and a head on it."""

    def __init__(self, vocab_size: int, width: int = SEPARATE_WIDTH) -> None:
        super().__init__()
        self.encoder, self.head = TextEncoder(vocab_size, width), ValueHead(width)

    def forward(self, tokens: Tokens) -> Tensor:
        """[episodes], between 0 and 1."""
        value: Tensor = self.head(self.encoder(tokens))
        return value


def value_loss(
    value: nn.Module, seen: Tensor | Tokens, *, target: Tensor, flow: ValueFlow, value_coef: float, n_episodes: float
) -> Tensor | None:
    """The share of these episodes in the mean squared error of V, weighted as `flow` says; None where it is nothing.

    `seen` is what V looks at: the guide's states [episodes, width], or tokens. shared_trunk: weight `value_coef`, and
    the gradient reaches the guide through its states. stop and straight_through: weight 1, for V alone. A target that
    is nan is unknown: V learns nothing from it.
    """
    if flow == "shared_trunk":
        if value_coef == 0:
            return None
        return value_coef * _squared_error(value(seen), target) / n_episodes
    detached = seen.detach() if isinstance(seen, Tensor) else seen
    return _squared_error(value(detached), target) / n_episodes


def _squared_error(values: Tensor, target: Tensor) -> Tensor:
    wanted = target.to(values.device)
    return (values - wanted.where(~wanted.isnan(), values.detach())).square().sum()


def straight_through(log_probs: Tensor, tokens: Tensor, *, embedding: Tensor) -> Tensor:
    """Embeddings of sampled tokens whose gradient is that of the expected embedding.

    log_probs [..., vocabulary], tokens int64 [...], embedding [vocabulary, width] -> [..., width]. The values are those
    of the tokens; the gradient flows as if each token were the mixture that it was drawn from (biased).
    """
    probabilities = log_probs.exp()
    one_hot = torch.nn.functional.one_hot(tokens, log_probs.shape[-1]).to(probabilities.dtype)
    return (one_hot + probabilities - probabilities.detach()) @ embedding.detach().to(probabilities.dtype)


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
