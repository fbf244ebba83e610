"""The value of the state before turn 2: how likely the second answer will be right.

It sees problem, first answer and hint, and not the second answer. V = sigmoid(linear(h)), where h is the guide's hidden
state at the last token of its hint (`ValueHead`), or what a network of its own makes of these tokens (`SeparateValue`).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from sftplay.config.schema.score import SEPARATE_WIDTH
from sftplay.tasks.score.learning.encoder import TextEncoder, Tokens

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
