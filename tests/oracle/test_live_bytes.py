"""Counting of live bytes, against hand arithmetic and torch's own tracker."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from oracle.live_bytes import LiveBytes

WEIGHTS = 4 * (64 * 128 + 128 + 128 * 32 + 32)  # fp32, two linear layers with bias


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))


@pytest.mark.parametrize("contents", [nullcontext, FakeTensorMode], ids=["real", "fake"])
def test_a_step_of_two_layers_needs_what_hand_arithmetic_says(contents):
    with contents(), LiveBytes() as live:
        model = two_layers()
        assert live.live_bytes == WEIGHTS
        live.forget_peaks()
        live.enter_phase("forward")
        x = torch.randn(16, 64)
        loss = model(x).sum()
        # Beside the input, both sides of the ReLU live at once.
        assert live.peaks_bytes["forward"] == WEIGHTS + 4 * 16 * (64 + 128 + 128)
        # Afterwards the input of each layer is kept, and the loss.
        assert live.live_bytes == WEIGHTS + 4 * 16 * (64 + 128) + 4
        live.enter_phase("backward")
        loss.backward()
    # At the end all gradients, the gradient before the ReLU, the input, the loss and its gradient; the ReLU's output
    # is gone by then.
    assert live.peaks_bytes["backward"] == 2 * WEIGHTS + 4 * 16 * (64 + 128) + 4 + 4


def test_views_count_once_and_storages_go_with_their_last_reference():
    with LiveBytes() as live:
        whole = torch.empty(1000)
        part = whole[:10].view(2, 5)
        assert live.live_bytes == 4000
        del whole
        assert live.live_bytes == 4000
        del part
        assert live.live_bytes == 0


def test_the_peak_of_a_real_model_is_the_one_torch_finds():
    from torch.distributed._tools.mem_tracker import MemTracker

    def step(model: nn.Module) -> None:
        model(torch.randn(8, 64)).square().mean().backward()

    torch.manual_seed(0)
    tracker, model = MemTracker(), two_layers()
    tracker.track_external(model)
    with tracker:
        step(model)
    found = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    with LiveBytes() as live:
        step(two_layers())
    assert max(live.peaks_bytes.values()) == found
