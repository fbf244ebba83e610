"""The state of the model around TRL's constructor and its generation: dtypes, shards, the reference, the loss scale."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from trl.trainer.utils import split_tensor_dict

from sftplay import log
from sftplay.errors import RunError
from sftplay.train.upstream import read_micro_batches, replace_micro_batches, replaced_attributes, restore_micro_steps


def window_path(checkpoint: Path, *, rank: int | None = None) -> Path:
    """Return the file of a rank; by default of this rank."""
    return checkpoint / f"drawing-{log.rank() if rank is None else rank}.safetensors"


def save_window(trainer: Any, checkpoint: Path) -> None:
    """Write the rollout batch, where the next step still trains on it."""
    if not _continues_batch(trainer, trainer.state.global_step):
        return
    micro_batches = read_micro_batches(trainer) or []
    tensors = {
        f"{number}/{name}": value.contiguous().clone()
        for number, micro_batch in enumerate(micro_batches)
        for name, value in micro_batch.items()
        if value is not None
    }
    facts = {
        "processes": log.world_size(),
        "micro_batches": len(micro_batches),
        "rows": len(micro_batches[0]["row"]),
        "drawing": trainer.rollout_figures,
    }
    save_file(tensors, window_path(checkpoint), metadata={"facts": json.dumps(facts)})


def load_window(trainer: Any, checkpoint: Path) -> None:
    """Restore the trainer's rollout batch from the checkpoint. Smaller micro-batches are split from the saved ones.
    Raise RunError where another number of processes sampled the rollout batch, its micro-batches cannot be split
    evenly, or it is missing.
    """
    step = int(checkpoint.name.rpartition("-")[2])
    restore_micro_steps(trainer, step * trainer.args.gradient_accumulation_steps)
    if not _continues_batch(trainer, step):
        return
    path = window_path(checkpoint, rank=0)
    if not path.exists():
        fix = "continue from the checkpoint before it: set this one aside"
        raise RunError("the completions of its rollout batch are missing", where=str(path), fix=fix)
    with safe_open(path, framework="pt") as file:
        facts: dict[str, Any] = json.loads(file.metadata()["facts"])
    n_saved, n_now = facts["micro_batches"], trainer.args.steps_per_generation
    parts, rest = divmod(n_now, n_saved)
    if facts["processes"] != log.world_size() or not parts or rest or facts["rows"] % parts:
        raise RunError(
            f"it lies inside a rollout batch of {facts['processes']} processes with {n_saved} micro-batches each; now"
            f" there are {log.world_size()} processes with {n_now} each",
            where=str(checkpoint),
            fix="continue with the sizes of the first start (NPROC=, train.batch_size)",
        )
    micro_batches: list[dict[str, Any]] = [{} for _ in range(n_saved)]
    for key, tensor in load_file(window_path(checkpoint)).items():  # it takes no device like cpu:0
        number, _, name = key.partition("/")
        micro_batches[int(number)][name] = tensor.to(trainer.accelerator.device)
    replace_micro_batches(trainer, [part for kept in micro_batches for part in split_tensor_dict(kept, parts)])
    trainer.rollout_figures = facts["drawing"]


def _continues_batch(trainer: Any, step: int) -> bool:
    """Return whether the step after `step` trains on completions that were sampled before it."""
    micro_steps = trainer.args.steps_per_generation * trainer.num_iterations
    return bool(step * trainer.args.gradient_accumulation_steps % micro_steps)


REFERENCE = "ref"  # TRL's name of the reference adapter (`_generate_and_score_completions`)


@contextmanager
def dtypes_kept(args: Any, device: torch.device) -> Iterator[None]:
    """Inside, TRL does not convert the model to 16 bits before it generates; the model computes in its weights' dtypes.

    TRL would convert the whole model for good, with fp32 trainable weights and rotary frequencies (trl 1.16,
    `_generate_single_turn`).
    """
    with replaced_attributes(args, bf16=False, fp16=False), torch.autocast(device.type, enabled=False):
        yield


@contextmanager
def gathered_root(model: Any) -> Iterator[None]:
    """Inside, every rank holds the weights outside the layers of `model`, where FSDP shards a model with an adapter."""
    if not (hasattr(model, "unshard") and hasattr(model, "peft_config")):
        yield
        return
    model._get_fsdp_state()._lazy_init()  # else the first layer that is called would take itself for the outermost
    model.unshard()
    try:
        yield
    finally:
        model.reshard()


def keep_reference(model: Any) -> None:
    """Add a frozen copy of the current adapter."""
    weights = get_peft_model_state_dict(model, adapter_name="default")
    model.add_adapter(REFERENCE, model.peft_config["default"])
    set_peft_model_state_dict(model, weights, adapter_name=REFERENCE)
    model.set_adapter("default")
    for name, parameter in model.named_parameters():
        if f".{REFERENCE}." in f"{name}.":
            parameter.requires_grad_(False)
