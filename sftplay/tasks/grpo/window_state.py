"""What a checkpoint keeps of a drawing that is not used up: each rank's completions, and what they were paid.

TRL keeps neither in its checkpoints. With it a run continues in the middle of a drawing as if it had not stopped.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from trl.trainer.utils import split_tensor_dict

from sftplay import log
from sftplay.errors import RunError


def window_path(checkpoint: Path, *, rank: int | None = None) -> Path:
    """The file of a rank, of this one where none is named."""
    return checkpoint / f"drawing-{log.rank() if rank is None else rank}.safetensors"


def save_window(trainer: Any, checkpoint: Path) -> None:
    """Write the rest of the drawing, where the next step still learns from it."""
    if not _is_inside(trainer, trainer.state.global_step):
        return
    tensors = {
        f"{number}/{name}": value.contiguous().clone()
        for number, micro_batch in enumerate(trainer._buffered_inputs)
        for name, value in micro_batch.items()
        if value is not None
    }
    facts = {
        "processes": log.world_size(),
        "micro_batches": len(trainer._buffered_inputs),
        "rows": len(trainer._buffered_inputs[0]["row"]),
        "drawing": trainer.drawing,
    }
    save_file(tensors, window_path(checkpoint), metadata={"facts": json.dumps(facts)})


def load_window(trainer: Any, checkpoint: Path) -> None:
    """Let the trainer go on where the checkpoint was written. Smaller micro-batches are parts of the kept ones.

    Raises:
        RunError: the drawing was made by another number of processes, its micro-batches cannot be split evenly, or it
            is missing.
    """
    step = int(checkpoint.name.rpartition("-")[2])
    trainer._step = step * trainer.args.gradient_accumulation_steps
    if not _is_inside(trainer, step):
        return
    facts = _facts(window_path(checkpoint, rank=0))
    kept, now = facts["micro_batches"], trainer.args.steps_per_generation
    parts, rest = divmod(now, kept)
    if facts["processes"] != log.world_size() or not parts or rest or facts["rows"] % parts:
        raise RunError(
            f"it lies inside a drawing of {facts['processes']} processes with {kept} micro-batches each; now there are"
            f" {log.world_size()} processes with {now} each",
            where=str(checkpoint),
            fix="continue with the sizes of the first start (NPROC=, train.batch_size)",
        )
    micro_batches: list[dict[str, Any]] = [{} for _ in range(kept)]
    for key, tensor in load_file(window_path(checkpoint)).items():  # it takes no device like cpu:0
        number, _, name = key.partition("/")
        micro_batches[int(number)][name] = tensor.to(trainer.accelerator.device)
    trainer._buffered_inputs = [part for each in micro_batches for part in split_tensor_dict(each, parts)]
    trainer.drawing = facts["drawing"]


def _is_inside(trainer: Any, step: int) -> bool:
    """Whether the step after `step` learns from completions that were drawn before."""
    steps_each = trainer.args.steps_per_generation * trainer.num_iterations
    return bool(step * trainer.args.gradient_accumulation_steps % steps_each)


def _facts(path: Path) -> dict[str, Any]:
    if not path.exists():
        fix = "continue from the checkpoint before it: set this one aside"
        raise RunError("the completions of its drawing are missing", where=str(path), fix=fix)
    with safe_open(path, framework="pt") as file:
        facts: dict[str, Any] = json.loads(file.metadata()["facts"])
    return facts
