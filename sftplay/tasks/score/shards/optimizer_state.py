"""The state of an optimizer whose weights are in shards, in a file as one of whole weights writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from sftplay import log
from sftplay.tasks.score.shards.models import gathered, part_of


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
