"""Muon in fp32 against torch's own, which computes in bf16."""

from __future__ import annotations

import pytest
import torch

from sftplay.model.base_training import Muon


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
