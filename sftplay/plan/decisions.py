"""What follows from a config and the kind of device before any size: precision, kernels, optimizer, rate."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from typing import TYPE_CHECKING, Any

from sftplay.config.cluster import BACKEND, unsloth_conflicts
from sftplay.config.run import FLASH_KERNELS, RunConfig
from sftplay.errors import ConfigError, MachineError
from sftplay.plan.shape import ModelShape

if TYPE_CHECKING:
    from sftplay.machine.gpu import Machine


@dataclass(frozen=True)
class Decision:
    """A value that the kit chose for a key, and why."""

    value: Any
    reason: str


Decisions = dict[str, Decision]  # by config key

UNSLOTH_FIX = f"`make train-unsloth` builds and uses an environment that has it; or write {BACKEND}: bnb"


def choose_backend(cfg: RunConfig, machine: Machine, *, world_size: int) -> Decision:
    """Choose `bnb` or `unsloth`.

    Raises:
        MachineError: unsloth is asked for and cannot be used. It is never replaced in silence.
    """
    wanted = cfg.tuning.backend
    if wanted == "bnb":
        return Decision("bnb", "as given")
    obstacle, fix = machine.unsloth_problem, UNSLOTH_FIX
    if world_size > 1:
        # Not tried here with several GPUs, and its own source calls that a beta.
        obstacle = f"it trains in one process, not in {world_size}"
        fix = f"use one process, or write {BACKEND}: bnb"
    for conflict in islice(unsloth_conflicts(cfg), 1):
        obstacle, fix = f"{conflict.keys[0]}: {conflict.what}", conflict.fix
    if wanted == "unsloth":
        if obstacle:
            where = f"{cfg.origins.get(BACKEND, 'default')} {BACKEND}"
            raise MachineError(f"unsloth cannot be used: {obstacle}", where=where, fix=fix)
        return Decision("unsloth", "as given")
    if obstacle:
        return Decision("bnb", f"unsloth is not taken: {obstacle}")
    if not machine.gpus:
        return Decision("bnb", "unsloth is installed, but without a GPU it computes with the same libraries")
    return Decision("unsloth", "it is installed, there is a GPU, and every library is within the versions it asks for")


def decide_numerics(cfg: RunConfig, machine: Machine, *, shape: ModelShape | None = None) -> Decisions:
    """Decide precision, attention, packing, optimizer, pinned memory, learning rate.

    `shape` is the model's, None where it is not known.

    Raises:
        MachineError: an explicit precision or attention cannot run here.
    """
    train, gpus = cfg.train, machine.gpus
    if not gpus and train.precision == "fp16":
        where = f"{cfg.origins.get('train.precision', 'train')} train.precision"
        fix = "leave train.precision on auto (fp32 here), or use bf16"
        raise MachineError("fp16 needs a GPU; on a CPU it would be ignored", where=where, fix=fix)
    precision = Decision("fp32", "no GPU: a CPU computes fp32 fastest")
    has_bf16 = bool(gpus) and all(gpu.has_bf16 for gpu in gpus)
    if has_bf16:
        precision = Decision("bf16", "every GPU has bf16 (compute capability 8.0 or later)")
    elif gpus and not cfg.task.has_fp16:
        precision = Decision("fp32", "a GPU older than Ampere has no bf16, and fp16 would overflow in the loss")
    elif gpus:
        precision = Decision("fp16", "a GPU older than Ampere has no bf16")
    chosen = precision.value if train.precision == "auto" else train.precision
    has_flash = has_bf16 and chosen != "fp32" and find_spec("flash_attn") is not None
    package = "kernels" if "/" in cfg.model.attn else "flash_attn"
    can_flash = has_bf16 and chosen != "fp32" and find_spec(package) is not None
    where = f"{cfg.origins.get('model.attn', 'model')} model.attn"
    if cfg.model.attn in FLASH_KERNELS and not can_flash:
        needs = f"an Ampere GPU, 16-bit precision and the package {package.replace('_', '-')}"
        raise MachineError(f"{cfg.model.attn} needs {needs}", where=where, fix="leave model.attn on auto (sdpa here)")
    attn = Decision("flash_attention_2" if has_flash else "sdpa", "fastest kernel installed for this device")
    if shape is not None and shape.softcap_attn:
        if cfg.model.attn == "sdpa":
            fix = f"leave model.attn on auto ({'flash_attention_2' if has_flash else 'eager'} here)"
            what = "the model caps the scores of its attention, which sdpa does not do"
            raise MachineError(what, where=where, fix=fix)
        attn = attn if has_flash else Decision("eager", "the model caps the scores of its attention; sdpa does not")
    if shape is not None and shape.family == "gpt_oss" and cfg.model.attn != "eager" and "/" not in cfg.model.attn:
        if cfg.model.attn != "auto":
            what = f"its attention has a learned sink, which {cfg.model.attn} leaves out"
            raise MachineError(what, where=where, fix="leave model.attn on auto (eager here)")
        attn = Decision("eager", "its attention has a learned sink, which no installed kernel knows")
    has_varlen = (attn.value if cfg.model.attn == "auto" else cfg.model.attn) in FLASH_KERNELS
    by_tokens = train.batching == "tokens"
    why = "flash attention skips the gaps" if has_varlen else "without a varlen kernel packing costs more than it saves"
    why = "train.batching tokens forms micro-batches of padded rows" if by_tokens else why
    why = "the rows are full blocks already" if cfg.learns_documents else why
    hands_on = shape is not None and shape.state_leaks
    if hands_on and cfg.packs_rows:
        what, where = "its layers carry a state from one packed row into the next", cfg.origins.get("train.packing", "")
        raise ConfigError(what, where=f"{where} train.packing true", fix="write train.packing: false, or auto")
    why = "layers carry a state along the row, which packed rows would hand on" if hands_on else why
    rate = cfg.task.rates[cfg.tuning.mode]
    return {
        "train.precision": precision,
        "model.attn": attn,
        "train.packing": Decision(has_varlen and not by_tokens and not cfg.learns_documents and not hands_on, why),
        "train.optim": _decide_optimizer(cfg, chosen),
        "train.dataloader_pin_memory": Decision(bool(gpus), "page-locked memory speeds copies to a GPU only"),
        "train.learning_rate": Decision(rate, f"usual peak rate of {cfg.tuning.mode} {cfg.task_mode}"),
    }


def _decide_optimizer(cfg: RunConfig, precision: str) -> Decision:
    """AdamW; in fp16 not torch's fused one.

    That one unscales the gradients and leaves steps out by itself (torch, `GradScaler.step`,
    `_step_supports_amp_scaling`). accelerate then sees every step as taken, and steps that overflow use up the warm-up.
    """
    if precision != "fp16":
        return Decision("adamw_torch_fused", "one kernel a step, no copy of the gradients")
    if cfg.train.optim == "adamw_torch_fused":
        what = "in fp16 it hides from the schedule which steps overflowed and were left out"
        where = f"{cfg.origins.get('train.optim', 'train')} train.optim adamw_torch_fused"
        raise ConfigError(what, where=where, fix="write train.optim: adamw_torch, or leave it on auto")
    return Decision("adamw_torch", "in fp16 the fused one hides which steps were left out")


def scaled_rate(cfg: RunConfig) -> tuple[str, ...]:
    """Return a note on the rate that `train.lr_scaling` makes of the one written down; none where nothing is scaled."""
    train = cfg.train
    if train.lr_scaling == "none":
        return ()
    batches = f"found with {train.lr_batch_size} rows a step, {train.effective_batch_size} here"
    found = f"train.learning_rate {train.learning_rate:g} {batches}"
    return (f"{found}: train.lr_scaling {train.lr_scaling} trains with a peak rate of {train.peak_rate:.6g}",)


def without_effect(cfg: RunConfig, machine: Machine) -> tuple[str, ...]:
    """Return a note on each setting that has no effect on this machine, or in this task."""
    if machine.gpus:
        if cfg.task.is_probed or cfg.train.probe == "off":
            return ()
        return (f"train.probe measures no step of task_mode {cfg.task_mode}: its memory is estimated",)
    asked = {"train.dataloader_pin_memory": cfg.train.dataloader_pin_memory is True}
    asked["train.probe always"] = cfg.train.probe == "always"
    # Without a GPU processes talk over gloo, which shares the interface with NCCL and nothing else.
    nccl = cfg.cluster.nccl.model_dump(exclude={"socket_ifname"}, exclude_none=True)
    asked |= dict.fromkeys((f"cluster.nccl.{name}" for name in nccl), True)
    return tuple(f"{key} has no effect without a GPU" for key, is_asked in asked.items() if is_asked)
