"""The norm of a gradient compared with fp64, in cases where torch's own norm in fp32 is inexact."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sftplay.train.exact_batch import CHUNK, gradient_norm, rough_gradient_norm


def with_gradients(*sizes: int) -> list[nn.Parameter]:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    for each in parameters:
        each.grad = torch.randn(each.shape) * torch.exp(2 * torch.randn(each.shape))
    return [*parameters, nn.Parameter(torch.zeros(3))]


@pytest.mark.parametrize("sizes", [(1,), (CHUNK - 1, CHUNK, CHUNK + 1), (2_000_000, 5), ()])
def test_norm_is_that_of_fp64(sizes: tuple[int, ...]):
    parameters = with_gradients(*sizes)
    exact = sum(float(each.grad.double().square().sum()) for each in parameters if each.grad is not None) ** 0.5
    assert float(gradient_norm(parameters)) == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_norm_of_a_gradient_that_is_not_finite_is_not_finite(bad: float):
    parameters = with_gradients(CHUNK + 7)
    parameters[0].grad[-1] = bad
    assert not torch.isfinite(gradient_norm(parameters))
    assert not torch.isfinite(rough_gradient_norm(parameters))
