"""Products of puzzle models on a CPU: oneDNN's are those of float64, and its place is where it is faster."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from sftplay.tasks.hrm.network import OneDnnProduct

HAS_ONE_DNN = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs a torch with oneDNN")


def given(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@HAS_ONE_DNN
@pytest.mark.parametrize("part", [slice(None), slice(1, None)], ids=["whole", "behind a prefix"])
def test_products_and_gradients_of_one_dnn_are_those_of_float64(part: slice):
    x, weight, upstream = given(5, 7, 24, seed=1), given(10, 24, seed=2), given(5, 7, 10, seed=3)[:, part]
    found = []
    for product, dtype in ((OneDnnProduct.apply, torch.float32), (functional.linear, torch.float64)):
        leaves = [each.to(dtype).requires_grad_() for each in (x, weight)]
        out = product(leaves[0][:, part], leaves[1])
        found.append([out, *torch.autograd.grad(out, leaves, upstream.to(dtype))])
    for mine, exact in zip(*found, strict=True):
        assert mine.dtype == torch.float32
        assert torch.allclose(mine.double(), exact, atol=2e-5)


@HAS_ONE_DNN
def test_a_gradient_that_is_one_number_for_all_reaches_both_sides_of_a_product():
    x, weight = given(3, 4, seed=1).requires_grad_(), given(2, 4, seed=2).requires_grad_()
    OneDnnProduct.apply(x, weight).sum().backward()  # the gradient of a sum has strides of 0
    assert x.grad is not None
    assert weight.grad is not None
    assert torch.allclose(x.grad, weight.detach().sum(dim=0).expand(3, 4))
    assert torch.allclose(weight.grad, x.detach().sum(dim=0).expand(2, 4))
    frozen = given(3, 4, seed=1)
    OneDnnProduct.apply(frozen, weight).sum().backward()
    assert frozen.grad is None
