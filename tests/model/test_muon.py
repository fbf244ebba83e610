"""Muon in fp32 against torch's own, which computes in bf16."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from sftplay.model.base_training import Muon, orthogonal


@pytest.mark.parametrize("shape", [(48, 48), (96, 32), (32, 96)])
def test_it_steps_as_torch_s_muon_does_up_to_the_rounding_of_bf16(shape):
    torch.manual_seed(0)
    start, gradients = torch.randn(shape), torch.randn(4, *shape)
    ours, reference = (torch.nn.Parameter(start.clone()) for _ in range(2))
    pairs = [(ours, Muon([ours], lr=0.1)), (reference, torch.optim.Muon([reference], lr=0.1, weight_decay=0.0))]
    for gradient in gradients:
        for weight, optimizer in pairs:
            weight.grad = gradient.clone()
            optimizer.step()
    moved = (reference - start).norm()
    assert (ours - reference).norm() < 0.02 * moved


def test_its_directions_are_nearly_orthogonal():
    torch.manual_seed(0)
    sizes = torch.linalg.svdvals(orthogonal(torch.randn(64, 160)))
    assert sizes.min() > 0.6
    assert sizes.max() < 1.3


def test_nothing_is_computed_in_16_bits():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        seen: ClassVar[set[torch.dtype]] = set()

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            found = function(*args, **(kwargs or {}))
            if isinstance(found, torch.Tensor):
                self.seen.add(found.dtype)
            return found

    weight = torch.nn.Parameter(torch.randn(8, 24))
    optimizer = Muon([weight], lr=0.1)
    weight.grad = torch.randn(8, 24)
    with Watch():
        optimizer.step()
    assert Watch.seen == {torch.float32}
