"""Sections of the guide on distributed BiLevel SCoRe, each of its keys with what to write here in its place.

They are answered like names of other kits, and never accepted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sftplay.config.read.yaml12 import KeyPath

_DEVICES = {
    "base_model_device": "score.devices.solver",
    "guidance_model_device": "score.devices.guide",
    "critic_device": "score.devices.critic",
    "value_function_device": "score.devices.value",
    "target_critic_device": "score.devices.target_critic",
    "reference_model_device": "score.devices.ref",
}

_MEMORY = {
    "use_gradient_checkpointing": "train.gradient_checkpointing",
    "use_flash_attention_2": "model.attn: flash_attention_2, or leave it to auto",
    "use_bf16_mixed_precision": "train.precision: bf16",
    "cpu_offloading.enable": (
        "score.devices.ref: cpu, with tuning.mode: full; adapters need none, their reference is the base without them"
    ),
    "cpu_offloading.offload_targets": (
        "score.devices.ref: cpu and score.devices.target_critic: cpu, with tuning.mode: full; adapters: the second"
    ),
}

_BATCH = {
    "total_batch_size": "train.effective_batch_size: the episodes of a step over all processes",
    "per_gpu_batch_size": "train.effective_batch_size: all GPUs together, each process has an equal share",
    "micro_batch_size": "train.batch_size",
    "gradient_accumulation_steps": "train.grad_accum: auto; it follows from the two sizes and the processes",
    "adaptive_batch_sizing": "train.batch_size: auto; it is measured at the start, and halved where memory runs out",
    "min_batch_size": "train.batch_size: auto; it has no lower bound, as each size learns the same",
    "max_batch_size": "train.batch_size: auto, or the largest yourself",
}

_DEEPSPEED = {
    "zero_stage": "score.placement: sharded, with tuning.mode: full; DeepSpeed trains one model, and here are two",
    "offload_optimizer": "tuning.mode: lora; its state is small, and nothing offloads it",
    "offload_param": "score.placement: sharded, with tuning.mode: full; a process holds a part, nothing is offloaded",
}

_COMMUNICATION = {
    "gradient_compression": "cluster.comm.hook: none; task score sends gradients whole, once a step",
    "compression_ratio": "cluster.comm.hook: none; task score sends gradients whole, once a step",
}

SECTIONS: dict[str, dict[str, str]] = {
    "distributed": {f"device_placement.{name}": action for name, action in _DEVICES.items()},
    "memory_optimization": _MEMORY,
    "batch_optimization": _BATCH,
    "deepspeed_config": _DEEPSPEED,
    "communication": _COMMUNICATION,
}
"""Section -> its keys -> what to write here, the key first."""


def keys_below(path: KeyPath, value: Any) -> Iterator[KeyPath]:
    """The keys of a section of the guide, each to be answered by itself; any other unknown name is one key."""
    known = SECTIONS.get(str(path[0]))
    if known is None or action_for(path) or not isinstance(value, dict) or not value:
        yield path
        return
    for name, inner in value.items():
        yield from keys_below((*path, str(name)), inner)


def action_for(path: KeyPath) -> str:
    """What to write in place of a key of the guide; empty for any other name."""
    return SECTIONS.get(str(path[0]), {}).get(".".join(map(str, path[1:])), "")
