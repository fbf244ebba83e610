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
        "score.devices.ref: cpu; with adapters it is not needed, as the reference is the base with its adapters off"
    ),
    "cpu_offloading.offload_targets": (
        "score.devices.ref: cpu and score.devices.target_critic: cpu; with adapters the first is not needed"
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
    "zero_stage": "cluster.strategy: zero1, zero2 or zero3",
    "offload_optimizer": "cluster.deepspeed: deepspeed_configs/zero2_offload.json",
    "offload_param": "cluster.deepspeed: deepspeed_configs/zero3_offload.json; only zero3 can share weights out",
}

_COMMUNICATION = {
    "gradient_compression": "cluster.comm.hook: fp16 or powersgd",
    "compression_ratio": "cluster.comm.hook: fp16 halves what is sent; no hook has a ratio",
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
