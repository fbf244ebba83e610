"""AdamATan2 (Everett et al. 2024, arXiv:2407.05872): Adam with atan2 instead of a quotient with an epsilon.

The size of a step does not depend on the scale of the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


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
            self._update(weights, group)
        return loss

    def _update(self, weights: list[torch.Tensor], group: dict[str, Any]) -> None:
        gradients = [weight.grad for weight in weights]
        first = [self.state[weight]["exp_avg"] for weight in weights]
        second = [self.state[weight]["exp_avg_sq"] for weight in weights]
        beta1, beta2 = group["betas"]
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_lerp_(first, gradients, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
        for weight, m, v in zip(weights, first, second, strict=True):
            steps = float(self.state[weight]["step"])
            correct1, correct2 = 1 - beta1**steps, 1 - beta2**steps
            weight.add_(torch.atan2(m / correct1, (v / correct2).sqrt()), alpha=-group["lr"])
