"""What torch's first FSDP leaves alive of frozen layers that are checkpointed, in one process on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from torch.utils.checkpoint import checkpoint

from oracle.cases import LLAMA, TraceSettings
from oracle.closed_form import read_memory_setup
from oracle.live_bytes import LiveBytes
from sftplay.plan.memory import Size, estimate, kept_bytes
from sftplay.plan.shape_from_config import shape_from_config

TOKENS, WIDTH, LAYERS = 24, 16, 5


class Pair(nn.Module):
    """A frozen linear layer and a narrow pair that trains, as PEFT has them."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Stack(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Pair() for _ in range(LAYERS))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def is_unit(module: nn.Module) -> bool:
    """A layer, and apart from it what trains, as PEFT's `fsdp_auto_wrap_policy` has it."""
    return isinstance(module, Pair) or (isinstance(module, nn.Linear) and module.weight.requires_grad)


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def streams_in_first_layer(reentrant: bool) -> int:
    """Tensors of the stream's size that live when backward has come to the first layer."""
    model = FullyShardedDataParallel(
        Stack(reentrant),
        auto_wrap_policy=partial(lambda_auto_wrap_policy, lambda_fn=is_unit),
        device_id=torch.device("cpu"),
    )
    x = torch.zeros(TOKENS, WIDTH, requires_grad=True)
    found = []
    with LiveBytes() as live:
        first = model.module.layers[0].module
        first.register_forward_pre_hook(lambda *_: found.append(sum(b.shape == (TOKENS, WIDTH) for b in live.alive())))
        model(x).sum().backward()
    return found[-1]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_reentrant_checkpoints_hold_every_input_and_its_gradient_to_the_end_of_backward(one_process):
    # Of the other layers, held by reentrant ones alone: inputs, and gradients of those; one of these enters this layer
    # either way.
    assert streams_in_first_layer(True) - streams_in_first_layer(False) == 2 * (LAYERS - 1) - 1


def test_the_plan_of_such_a_run_counts_them():
    shape = shape_from_config(LLAMA | {"vocab_size": 256, "num_hidden_layers": 16}, name="x")
    size = Size(rows=8, seq=512)
    held = read_memory_setup(TraceSettings(method="lora", base="bf16"), holds_inputs=True)
    activations = estimate(shape, held, size=size).components["activations"]
    assert activations == kept_bytes(shape, held, size=size) * (1 + 14 / 16)
