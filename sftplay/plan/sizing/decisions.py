"""What follows from a config and the kind of device before any size: backend, precision, kernels, optimizer, rate.

Each value comes with its reason. unsloth is judged by what the machine says of it; it is not imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from sftplay.config.rules.cluster import BACKEND, unsloth_conflicts
from sftplay.config.schema.run import RunConfig
from sftplay.errors import MachineError
from sftplay.machine.probe import Machine


@dataclass(frozen=True)
class Decision:
    """One value the kit chose, and why."""

    key: str
    value: Any
    reason: str


FIX = f"`make train-unsloth` builds and uses an environment that has it; or write {BACKEND}: bnb"


def choose_backend(cfg: RunConfig, machine: Machine, world_size: int) -> tuple[str, str]:
    """`bnb` or `unsloth`, and why.

    Raises:
        MachineError: unsloth is asked for and cannot be used. It is never replaced in silence.
    """
    wanted = cfg.tuning.backend
    if wanted == "bnb":
        return "bnb", "as given"
    obstacle, fix = _obstacle(cfg, machine, world_size)
    if wanted == "auto":
        if obstacle:
            return "bnb", f"unsloth is not taken: {obstacle}"
        if not machine.gpus:
            return "bnb", "unsloth is installed, but without a GPU it computes with the same libraries"
        return "unsloth", "it is installed, there is a GPU, and every library is within the versions it asks for"
    if obstacle:
        where = f"{cfg.origins.get(BACKEND, 'default')} {BACKEND}"
        raise MachineError(f"unsloth cannot be used: {obstacle}", where=where, fix=fix)
    return "unsloth", "as given"


def _obstacle(cfg: RunConfig, machine: Machine, world_size: int) -> tuple[str, str]:
    """What stands in unsloth's way and what to do about it; two empty words when nothing does."""
    for conflict in unsloth_conflicts(cfg):
        return f"{conflict.keys[0]}: {conflict.what}", conflict.fix
    if world_size > 1:
        # Not tried here with several GPUs, and its own source calls that a beta.
        return f"it trains in one process, not in {world_size}", f"use one process, or write {BACKEND}: bnb"
    return machine.unsloth_problem, FIX


RATES = {("full", "sft"): 1e-5, ("lora", "sft"): 2e-4, ("qlora", "sft"): 2e-4}


def decide_numerics(cfg: RunConfig, machine: Machine) -> list[Decision]:
    """Precision, attention, packing, optimizer, pinned memory.

    Raises:
        MachineError: an explicit precision or attention cannot run here.
    """
    train, gpus = cfg.train, machine.gpus
    bf16 = bool(gpus) and all(gpu.has_bf16 for gpu in gpus)
    if not gpus:
        precision = Decision("train.precision", "fp32", "no GPU: a CPU computes fp32 fastest")
    elif bf16:
        precision = Decision("train.precision", "bf16", "every GPU has bf16 (compute capability 8.0 or later)")
    else:
        precision = Decision("train.precision", "fp16", "a GPU older than Ampere has no bf16")
    if train.precision == "fp16" and not gpus:
        raise MachineError(
            "fp16 needs a GPU; on a CPU it would be ignored",
            where=f"{cfg.origins.get('train.precision', 'train')} train.precision",
            fix="leave train.precision on auto (fp32 here), or use bf16",
        )
    chosen = precision.value if train.precision == "auto" else train.precision
    flash = bf16 and chosen != "fp32" and find_spec("flash_attn") is not None
    if cfg.model.attn == "flash_attention_2" and not flash:
        raise MachineError(
            "flash_attention_2 needs an Ampere GPU, 16-bit precision and the package flash-attn",
            where=f"{cfg.origins.get('model.attn', 'model')} model.attn",
            fix="leave model.attn on auto (sdpa here)",
        )
    attn = Decision("model.attn", "flash_attention_2" if flash else "sdpa", "fastest kernel installed for this device")
    has_varlen = (attn.value if cfg.model.attn == "auto" else cfg.model.attn) == "flash_attention_2"
    by_tokens = train.batching == "tokens"
    why = "flash attention skips the gaps" if has_varlen else "without a varlen kernel packing costs more than it saves"
    why = "train.batching tokens forms pieces of padded rows" if by_tokens else why
    return [
        precision,
        attn,
        Decision("train.packing", has_varlen and not by_tokens, why),
        Decision("train.optim", "adamw_torch_fused", "one kernel a step, no copy of the gradients"),
        Decision("train.dataloader_pin_memory", bool(gpus), "page-locked memory speeds copies to a GPU only"),
    ]


def decide_rate(cfg: RunConfig) -> Decision:
    """The peak learning rate."""
    rate = RATES[cfg.tuning.mode, cfg.task_mode]
    return Decision("train.learning_rate", rate, f"usual peak rate of {cfg.tuning.mode} {cfg.task_mode}")


def scaled_rate(cfg: RunConfig) -> tuple[str, ...]:
    """In words, to which rate `train.lr_scaling` takes the one written down; nothing where it is none."""
    train = cfg.train
    if train.lr_scaling == "none":
        return ()
    batches = f"found with {train.lr_batch_size} rows a step, {train.effective_batch_size} here"
    found = f"train.learning_rate {train.learning_rate:g} {batches}"
    return (f"{found}: train.lr_scaling {train.lr_scaling} trains with a peak rate of {train.peak_rate:.6g}",)


def without_effect(cfg: RunConfig, machine: Machine) -> tuple[str, ...]:
    """What was asked for and does nothing on this machine, in words."""
    if machine.gpus:
        return ()
    asked = {"train.dataloader_pin_memory": cfg.train.dataloader_pin_memory is True}
    asked["train.probe always"] = cfg.train.probe == "always"
    # Without a GPU processes talk over gloo, which shares the interface with NCCL and nothing else.
    nccl = cfg.cluster.nccl.model_dump(exclude={"socket_ifname"}, exclude_none=True)
    asked |= dict.fromkeys((f"cluster.nccl.{name}" for name in nccl), True)
    return tuple(f"{key} has no effect without a GPU" for key, is_asked in asked.items() if is_asked)
