"""A moving average of the weights, which is evaluated and saved in their place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class MovingAverage:
    """Keeps decay * average + (1 - decay) * weight of each weight that the optimizer trains."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay = model, decay
        self.weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights of the model into the average."""
        now = dict(self.model.named_parameters())
        torch._foreach_lerp_(list(self.weights.values()), [now[name] for name in self.weights], 1 - self.decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within it the model has the averaged weights."""
        trained = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}
        self._fill(self.weights)
        try:
            yield
        finally:
            self._fill(trained)

    @torch.no_grad()
    def _fill(self, weights: dict[str, Tensor]) -> None:
        for name, weight in self.model.named_parameters():
            weight.copy_(weights[name])
