"""Save in a checkpoint each rank's puzzles under way, the order of the rows, and the averaged weights.

The Trainer's own files have the weights with the puzzle embeddings, the optimizer, the schedule and random numbers.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from sftplay import log
from sftplay.errors import RunError
from sftplay.tasks.hrm.act import Carry, Puzzles
from sftplay.tasks.hrm.network import State

SAMPLER = "sampler"
"""Key of the metadata of a rank's puzzles: where the next batch of rows begins."""


def save_progress(checkpoint: Path, *, carry: Carry, rows: dict[str, int], average: dict[str, Tensor] | None) -> None:
    """Write this rank's puzzles, the state of its sampler (`rows`) and, on the main one, the averaged weights.

    The rest of the checkpoint is there.
    """
    tensors = {**carry.state._asdict(), "steps": carry.steps, "halted": carry.halted, **carry.puzzles._asdict()}
    checkpoint.mkdir(parents=True, exist_ok=True)
    whole = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(whole, checkpoint / f"carry-{log.rank()}.safetensors", metadata={SAMPLER: json.dumps(rows)})
    if average is not None and log.is_main():
        save_file(average, checkpoint / "average.safetensors")


def load_progress(
    checkpoint: Path, device: torch.device, *, has_average: bool
) -> tuple[Carry, dict[str, int], dict[str, Tensor] | None]:
    """Load what `save_progress` takes, this rank's part of what all ranks have saved, on `device`.

    The ranks may be more or fewer than they were: together they have the puzzles of the whole batch, in rank order.

    Raises:
        RunError: a file is missing; another task has written the checkpoint.
    """

    def read(name: str) -> dict[str, Tensor]:
        path = checkpoint / f"{name}.safetensors"
        if not path.is_file():
            fix = "continue from a checkpoint of task mode hrm with the same hrm.ema"
            raise RunError("there is no such file in the checkpoint", where=str(path), fix=fix)
        # safetensors knows no `cpu:0`, which accelerate calls the device of each of several processes on CPUs.
        return {name: tensor.to(device) for name, tensor in load_file(path).items()}

    n_files = max(1, len(list(checkpoint.glob("carry-*.safetensors"))))
    parts = [read(f"carry-{rank}") for rank in range(n_files)]
    share = sum(len(part["steps"]) for part in parts) // log.world_size()
    rows = slice(log.rank() * share, (log.rank() + 1) * share)
    found = {name: torch.cat([part[name] for part in parts])[rows] for name in parts[0]}
    state = State(*(found[name] for name in State._fields))
    puzzles = Puzzles(*(found[name] for name in Puzzles._fields))
    with safe_open(checkpoint / "carry-0.safetensors", framework="pt") as opened:
        sampler = json.loads(opened.metadata()[SAMPLER])
    average = read("average") if has_average else None
    return Carry(state, found["steps"], found["halted"], puzzles), sampler, average
