"""The models of task score in shards (FSDP2), and their optimizer's state in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from sftplay import log
from sftplay.errors import ConfigError

T = TypeVar("T")

COMPUTED = {"bf16": torch.bfloat16, "no": None}
"""Mixed precision by accelerate's names -> the type in which gathered weights compute; None: their own."""


class FSDPModels(nn.Module):
    """The models that train, as the Trainer's wrapped model. Gradients are averaged in each backward pass."""

    bucket_bytes_cap = 25 * 2**20
    """What is sent at a time of the gradients of weights that every rank has whole; as in torch's DDP."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)

    def no_sync(self) -> AbstractContextManager[None]:
        """Nothing is put off: whole gradients would take as much memory as a model."""
        return nullcontext()


def mesh_of_ranks() -> DeviceMesh:
    """All ranks in a row, each with its own device."""
    return init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (log.world_size(),))


def shard(model: Any, mesh: DeviceMesh, *, precision: str, keeps_head: bool = False) -> None:
    """Leave this rank a part of each weight: layers are gathered one at a time, and so is an embedding of its own.

    All is given back after each pass. With `keeps_head` the model keeps its head until `reshard`: scores are made of a
    reference's head a second time, in the backward pass of another model.

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
    policy = MixedPrecisionPolicy(param_dtype=COMPUTED[precision], reduce_dtype=torch.float32)
    for unit in reversed(units):  # what lies within first
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=not keeps_head)
    model.within = _call
    register_fsdp_forward_method(model, "within")


def within(model: Any, work: Callable[[], T]) -> T:
    """The result of `work`, for which the weights of `model` are there as in its own forward pass.

    Tensors in the result may go backward; their backward pass has the weights too.
    """
    result: T = model.within(work) if is_sharded(model) else work()
    return result


def is_sharded(model: Any) -> bool:
    """Whether this rank holds a part of each weight only."""
    return hasattr(model, "unshard")


def gathered(tensor: Tensor) -> Tensor:
    """The whole tensor, on the CPU where it was in shards. Every rank must call it."""
    return tensor.full_tensor().cpu() if isinstance(tensor, DTensor) else tensor


def whole_weights(model: Any) -> dict[str, Tensor]:
    """The weights of a sharded model by their names, on the main rank; empty on the others. Every rank must call it."""
    state = model.state_dict()  # puts back into shards what is gathered
    named = dict(model.named_parameters(remove_duplicate=False))
    found: dict[str, Tensor] = {}
    wholes: dict[int, Tensor] = {}
    for name, tensor in state.items():
        key = id(named.get(name, tensor))  # tied weights stay one tensor
        if key not in wholes:
            whole = gathered(tensor)
            wholes[key] = whole if log.is_main() else tensor
        found[name] = wholes[key]
    return found if log.is_main() else {}


def load_whole(model: Any, checkpoint: Path) -> None:
    """Take the weights that a Trainer has written whole. Every rank must call it."""
    mine = dict(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for path in sorted(checkpoint.glob("model*.safetensors")):
            for name, whole in load_file(path).items():
                if name in mine:  # what is no weight is as it was
                    put(whole, mine[name])


def put(whole: Tensor, weight: Tensor) -> None:
    """Write a whole tensor over a weight, or over this rank's part of it. Every rank must call it."""
    weight.copy_(part_of(whole, weight) if isinstance(weight, DTensor) else whole)


def part_of(whole: Tensor, weight: DTensor) -> DTensor:
    """This rank's part of a tensor, as it has of `weight`. Every rank must call it."""
    return distribute_tensor(whole.to(weight.device), weight.device_mesh, weight.placements)


def _call(work: Callable[[], T]) -> T:
    return work()


def save_optimizer(optimizer: Any, path: Path) -> None:
    """Write the state as an optimizer of whole weights has it, so that any layout can go on with it. All ranks call."""
    state = optimizer.state_dict()
    kept: dict[int, dict[str, Any]] = {}
    for number, values in state["state"].items():
        whole = {name: gathered(value) if isinstance(value, Tensor) else value for name, value in values.items()}
        if log.is_main():
            kept[number] = whole
    if log.is_main():
        torch.save({**state, "state": kept}, path)


def load_optimizer(optimizer: Any, path: Path) -> None:
    """Take this rank's part of a state that was written whole."""
    state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    shared_out = {
        number: {name: _part(value, weights[number]) for name, value in values.items()}
        for number, values in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": shared_out})


def _part(value: Any, weight: Any) -> Any:
    """A moment in the shards of its weight; what is no moment, such as a count of steps, as it is."""
    if not isinstance(weight, DTensor) or not isinstance(value, Tensor) or value.shape != weight.shape:
        return value
    return part_of(value, weight)
