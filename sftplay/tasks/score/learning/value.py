"""The value of the state before turn 2: how likely the second answer will be right, read from the guide's own state.

V = sigmoid(linear(hidden state of the guide at the last token of its hint)). It sees problem, first answer and hint,
and not the second answer.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

ValueFlow = Literal["shared_trunk", "stop", "straight_through"]


class ValueHead(nn.Module):
    """One linear layer, in fp32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., width] -> [...], between 0 and 1."""
        value: Tensor = torch.sigmoid(self.linear(hidden.float()).squeeze(-1))
        return value


def value_loss(
    head: nn.Module, hidden: Tensor, *, target: Tensor, flow: ValueFlow, value_coef: float, n_episodes: float
) -> Tensor | None:
    """The share of these episodes in the mean squared error of V, weighted as `flow` says; None where it is nothing.

    shared_trunk: weight `value_coef`, and the gradient reaches the guide through `hidden` [episodes, width]. stop and
    straight_through: weight 1, for the head alone.
    """
    if flow == "shared_trunk":
        if value_coef == 0:
            return None
        return value_coef * (head(hidden) - target).square().sum() / n_episodes
    return (head(hidden.detach()) - target).square().sum() / n_episodes


def straight_through(log_probs: Tensor, tokens: Tensor, *, embedding: Tensor) -> Tensor:
    """Embeddings of sampled tokens whose gradient is that of the expected embedding.

    log_probs [..., vocabulary], tokens int64 [...], embedding [vocabulary, width] -> [..., width]. The values are those
    of the tokens; the gradient flows as if each token were the mixture that it was drawn from (biased).
    """
    probabilities = log_probs.exp()
    one_hot = torch.nn.functional.one_hot(tokens, log_probs.shape[-1]).to(probabilities.dtype)
    return (one_hot + probabilities - probabilities.detach()) @ embedding.detach().to(probabilities.dtype)
