"""What a checkpoint holds beside weights and optimizer: each rank's puzzles under way, the rows' order, the average.

The Trainer's own files have the weights with the puzzle embeddings, the optimizer, the schedule and random numbers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from sftplay import log
from sftplay.errors import RunError
from sftplay.tasks.hrm.act import Carry, Puzzles
from sftplay.tasks.hrm.model import State

if TYPE_CHECKING:
    from sftplay.tasks.hrm.trainer import PuzzleTrainer

AVERAGE = "average.safetensors"
SAMPLER = "sampler"
"""Key of a carry's metadata: where the next batch of rows begins."""


def carry_file(checkpoint: Path, rank: int) -> Path:
    """The file with the puzzles that a rank has under way."""
    return checkpoint / f"carry-{rank}.safetensors"


def save_progress(trainer: PuzzleTrainer, checkpoint: Path) -> None:
    """Write this rank's puzzles and, on the main one, the averaged weights. The rest of the checkpoint is there."""
    carry = trainer.carry
    assert carry is not None
    tensors = {
        "high": carry.state.high, "low": carry.state.low, "steps": carry.steps, "halted": carry.halted,
        **carry.puzzles._asdict(),
    }  # fmt: skip
    checkpoint.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in tensors.items()},
        carry_file(checkpoint, log.rank()),
        metadata={SAMPLER: json.dumps(trainer.train_rows.state())},
    )
    if trainer.average is not None and log.is_main():
        save_file(trainer.average.weights, checkpoint / AVERAGE)


def load_progress(trainer: PuzzleTrainer, checkpoint: Path) -> None:
    """Continue with the puzzles, the rows' order and the average of a checkpoint.

    Raises:
        RunError: a file of this rank is missing; another task has written the checkpoint.
    """
    path = carry_file(checkpoint, log.rank())
    found = _read(path, trainer.args.device)
    puzzles = Puzzles(*(found[name] for name in Puzzles._fields))
    trainer.carry = Carry(State(found["high"], found["low"]), found["steps"], found["halted"], puzzles)
    with safe_open(path, framework="pt") as opened:
        trainer.train_rows.restore(json.loads(opened.metadata()[SAMPLER]))
    if trainer.average is not None:
        average = _read(checkpoint / AVERAGE, trainer.args.device)
        trainer.average.weights = {name: average[name] for name in trainer.average.weights}


def _read(path: Path, device: torch.device) -> dict[str, Tensor]:
    if not path.is_file():
        fix = "continue from a checkpoint of task mode hrm, with as many processes as it had"
        raise RunError("there is no such file in the checkpoint", where=str(path), fix=fix)
    # safetensors knows no `cpu:0`, which accelerate calls the device of each of several processes on CPUs.
    return {name: tensor.to(device) for name, tensor in load_file(path).items()}
