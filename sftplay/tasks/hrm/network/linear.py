"""Linear layers: how their weights begin, and the library that multiplies on a CPU.

torch multiplies fp32 matrices on x86 CPUs by MKL. On AMD's CPUs MKL does without AVX-512, and is half as fast as
oneDNN, which torch brings too (docs/benchmarks.md). Other CPUs keep MKL, because nothing was measured on them. 16-bit
numbers go through oneDNN in torch itself.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

CUT = 2.0
"""Standard deviations beyond which a truncated normal distribution has nothing."""

STD_OF_CUT = 0.8796256610342398
"""Standard deviation of a standard normal distribution that is cut at +-CUT: sqrt(1 - 2 CUT phi(CUT) / (2 Phi(CUT) -
1)). torch's trunc_normal_ does not correct for it."""


def truncated_normal_(weight: Tensor, std: float) -> Tensor:
    """Fill `weight` from a normal distribution that is cut at two sigma, and whose standard deviation is `std`."""
    sigma = std / STD_OF_CUT
    with torch.no_grad():
        return nn.init.trunc_normal_(weight, std=sigma, a=-CUT * sigma, b=CUT * sigma)


class Linear(nn.Module):
    """A linear layer without a bias."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(truncated_normal_(torch.empty(n_out, n_in), n_in**-0.5))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype)
        if multiplies_by_one_dnn(x):
            multiply = OneDnnProduct.apply if torch.is_grad_enabled() else one_dnn_product
            product: Tensor = multiply(x, weight)
            return product
        return functional.linear(x, weight)


def multiplies_by_one_dnn(x: Tensor) -> bool:
    """Whether `x` is multiplied by oneDNN: in fp32, on a CPU of AMD with AVX-512, where nothing is compiled."""
    return (
        x.device.type == "cpu"
        and x.dtype == torch.float32
        and not torch.compiler.is_compiling()
        and torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and is_of_amd()
    )


@cache
def is_of_amd() -> bool:
    """Whether the CPU is one of AMD's. Where the system does not say so, it counts as another."""
    with suppress(OSError):
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    return False


class OneDnnProduct(torch.autograd.Function):
    """x [..., n_in] times the transposed weight [n_out, n_in], in fp32."""

    @staticmethod
    def forward(ctx: Any, *factors: Tensor) -> Tensor:
        # With a setup_context torch would look up the signature in each call, for a tenth of a small model's step.
        ctx.save_for_backward(*factors)
        return one_dnn_product(*factors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_x = one_dnn_product(gradient, weight.t()) if ctx.needs_input_grad[0] else None
        of_weight = (
            one_dnn_product(gradient.flatten(0, -2).t(), x.flatten(0, -2).t()) if ctx.needs_input_grad[1] else None
        )
        return of_x, of_weight


def one_dnn_product(x: Tensor, weight: Tensor) -> Tensor:
    """As functional.linear; torch's compiler calls oneDNN by this operator (torch/_inductor/mkldnn_ir.py)."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return product
