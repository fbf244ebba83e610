"""Shard the models of task score (FSDP2), and gather and load their weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from sftplay import log
from sftplay.errors import ConfigError

T = TypeVar("T")


class FSDPModels(nn.Module):
    """The trained models as the Trainer's wrapped model. Every backward pass averages gradients."""

    bucket_bytes_cap = 25 * 2**20
    """Bucket size for gradients of weights that every rank has whole; torch DDP's default."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)

    def no_sync(self) -> AbstractContextManager[None]:
        """Postpone nothing: whole gradients would take as much memory as a model."""
        return nullcontext()


def shard(model: Any, mesh: DeviceMesh, *, precision: str, keeps_head: bool = False) -> None:
    """Shard a model: a pass gathers one layer at a time, and an untied embedding likewise.

    A pass releases what it gathered. With `keeps_head` the model keeps its head until `reshard`: the backward pass of
    another model computes logits with a reference's head a second time. `precision` is accelerate's name: `no` computes
    in the stored dtype.

    Raises:
        ConfigError: the model names no layers.
    """
    names = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        fix = "choose another model, or score.placement: shared"
        raise ConfigError(f"{type(model).__name__} names no layers to shard", where="model.name", fix=fix)
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    units = [*layers, *([embeddings] if embeddings.weight is not head.weight else [])]
    dtype = {"bf16": torch.bfloat16, "no": None}[precision]
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for unit in reversed(units):  # inner modules first
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=not keeps_head)
    model.run_with_weights = lambda work: work()
    register_fsdp_forward_method(model, "run_with_weights")


def run_with_weights(model: Any, work: Callable[[], T]) -> T:
    """Return the result of `work`, run with the gathered weights of `model` as in a forward pass.

    A backward pass through tensors of the result has the weights too.
    """
    result: T = model.run_with_weights(work) if is_sharded(model) else work()
    return result


def is_sharded(model: Any) -> bool:
    """Whether this rank holds only a shard of the weights."""
    return hasattr(model, "unshard")


def gather_tensor(tensor: Tensor) -> Tensor:
    """Gather a tensor, to the CPU where it is sharded. Every rank must call it."""
    return tensor.full_tensor().cpu() if isinstance(tensor, DTensor) else tensor


def gather_weights(model: Any) -> dict[str, Tensor]:
    """Gather name -> weight of a sharded model on the main rank; empty on others. Every rank must call it."""
    state = model.state_dict()  # reshards gathered weights
    named = dict(model.named_parameters(remove_duplicate=False))
    found: dict[str, Tensor] = {}
    wholes: dict[int, Tensor] = {}
    for name, tensor in state.items():
        key = id(named.get(name, tensor))  # tied weights stay one tensor
        if key not in wholes:
            whole = gather_tensor(tensor)
            wholes[key] = whole if log.is_main() else tensor
        found[name] = wholes[key]
    return found if log.is_main() else {}


def load_full_weights(model: Any, checkpoint: Path) -> None:
    """Load the whole weights that a Trainer has saved. Every rank must call it."""
    weights = dict(model.named_parameters(remove_duplicate=False))
    for path in sorted(checkpoint.glob("model*.safetensors")):
        for name, whole in load_file(path).items():
            if name in weights:  # buffers stay as they are
                copy_into(whole, weights[name])


@torch.no_grad()
def copy_into(whole: Tensor, weight: Tensor) -> None:
    """Copy a whole tensor into a weight, or into this rank's shard. Every rank must call it."""
    weight.copy_(shard_like(whole, weight) if isinstance(weight, DTensor) else whole)


def shard_like(whole: Tensor, weight: DTensor) -> DTensor:
    """Return this rank's shard of a tensor, sharded like `weight`. Every rank must call it."""
    return distribute_tensor(whole.to(weight.device), weight.device_mesh, weight.placements)
