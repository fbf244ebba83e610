"""Muon in fp32. torch's own computes in bf16, which a CPU without AVX512-BF16 takes ten times as long for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic Newton-Schulz step, as in torch 2.13, torch/optim/_muon.py."""

STEPS = 5
EPSILON = 1e-7


class Muon(torch.optim.Optimizer):
    """Momentum with Nesterov's step, made orthogonal; for matrices only.

    The formulas and defaults are torch.optim.Muon's (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/).
    """

    def __init__(self, params: Iterable[Tensor], *, lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Change each matrix that has a gradient."""
        loss = closure() if closure else None
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is not None:
                    self._change(matrix, group)
        return loss

    def _change(self, matrix: Tensor, group: dict[str, Any]) -> None:
        state = self.state[matrix]
        average = state.setdefault("momentum_buffer", torch.zeros_like(matrix.grad))
        average.lerp_(matrix.grad, 1 - group["momentum"])
        direction = orthogonal(matrix.grad.lerp(average, group["momentum"]))
        rows, columns = matrix.shape
        matrix.add_(direction, alpha=-group["lr"] * math.sqrt(max(1, rows / columns)))


def orthogonal(matrix: Tensor) -> Tensor:
    """About U V^T of the matrix's U S V^T: singular values between 0.7 and 1.2, by five Newton-Schulz steps."""
    a, b, c = COEFFICIENTS
    is_tall = matrix.size(0) > matrix.size(1)
    found = matrix.T if is_tall else matrix
    found = found / found.norm().clamp(min=EPSILON)
    for _ in range(STEPS):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if is_tall else found
