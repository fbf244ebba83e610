"""AdamATan2, and the running average of weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class AdamATan2(torch.optim.Optimizer):
    """Adam with decoupled weight decay; its update is lr * atan2(m, sqrt(v)) of the corrected moments.

    Published rates are those of the package adam-atan2 0.0.3, which has no factor (csrc/adam_atan2.cu): where both
    moments are equal, a step is lr * pi / 4.
    """

    def __init__(self, params: Any, *, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every weight that has a gradient."""
        loss = closure() if closure else None
        for group in self.param_groups:
            weights = [p for p in group["params"] if p.grad is not None]
            if not weights:
                continue
            for weight in weights:
                state = self.state[weight]
                if not state:
                    state["step"] = torch.zeros(())
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
                state["step"] += 1
            gradients, (beta1, beta2) = [weight.grad for weight in weights], group["betas"]
            first, second = ([self.state[weight][key] for weight in weights] for key in ("exp_avg", "exp_avg_sq"))
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_lerp_(first, gradients, 1 - beta1)
            torch._foreach_mul_(second, beta2)
            torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
            for weight, m, v in zip(weights, first, second, strict=True):
                steps = float(self.state[weight]["step"])
                correct1, correct2 = 1 - beta1**steps, 1 - beta2**steps
                weight.add_(torch.atan2(m / correct1, (v / correct2).sqrt()), alpha=-group["lr"])
        return loss


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
        weights = dict(self.model.named_parameters())
        trained = {name: weight.detach().clone() for name, weight in weights.items()}
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(self.weights[name])
        try:
            yield
        finally:
            with torch.no_grad():
                for name, weight in weights.items():
                    weight.copy_(trained[name])
