"""From `auto` to numbers and names: backend, precision, attention, loss head, packing, optimizer, rate, batch sizes.

A simple rule for now; memory is not predicted yet. What holds from the first day is that
`batch_size * grad_accum * processes == effective_batch_size`, that an explicit value is never changed, and that every
choice comes with its reason. Below this module no config value is `auto`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from sftplay.config.schema import RunConfig
from sftplay.errors import ConfigError, MachineError
from sftplay.machine.probe import Machine
from sftplay.plan.backend import choose_backend
from sftplay.units import format_bytes

RATES = {("full", "sft"): 1e-5, ("lora", "sft"): 2e-4, ("qlora", "sft"): 2e-4}

TOKENS_PER_MICRO_BATCH = {"gpu": 16_384, "cpu": 1_024}
"""Rows go through the model together up to about this many tokens. A GPU needs them to be busy; a CPU is busy with one
row, and small pieces of rows of like length carry less padding (measured in docs/benchmarks.md)."""

LARGE_SCORES_BYTES = 2**31
"""From here on the scores of one micro-batch are computed in chunks: a tenth of the RAM these kits usually run in."""

ASSUMED_VOCAB = 128_000
"""Taken for a model whose config.json is not on this machine yet; few have more."""

CHUNKED_WINS_VOCAB = 32_000
"""Vocabulary above which holding all scores costs a GPU more than recomputing them in chunks."""


@dataclass(frozen=True)
class Decision:
    """One value the kit chose, and why."""

    key: str
    value: Any
    reason: str


@dataclass(frozen=True)
class SizedRun:
    """A config without any `auto`, and how it came about."""

    cfg: RunConfig
    world_size: int
    decisions: tuple[Decision, ...]
    notes: tuple[str, ...] = ()
    """What was asked for and has no effect on this machine."""

    def as_plan(self) -> dict[str, Any]:
        """What goes to plan.json."""
        train = self.cfg.train
        return {
            "world_size": self.world_size,
            "batch_size": train.batch_size,
            "grad_accum": train.grad_accum,
            "effective_batch_size": train.effective_batch_size,
            "decisions": [vars(decision) for decision in self.decisions],
        }


def size_run(cfg: RunConfig, machine: Machine, *, world_size: int = 1, vocab_size: int | None = None) -> SizedRun:
    """Replace every `auto` by a number or a name.

    `vocab_size` is the model's, None when it is not known before the download.

    Raises:
        ConfigError: the effective batch cannot be reached exactly; both neighbours are named.
        MachineError: an explicit backend, precision, attention or loss head cannot run here.
    """
    given, backend = cfg, Decision("tuning.backend", *choose_backend(cfg, machine, world_size))
    cfg = cfg.with_values({backend.key: backend.value}, cfg.origins.get(backend.key, "auto"))
    decisions = [backend, *_decide_numerics(cfg, machine), _decide_rate(cfg)]
    batch, accum, reason = split_batch(cfg, world_size, has_gpu=bool(machine.gpus))
    decisions += [Decision("train.batch_size", batch, reason), Decision("train.grad_accum", accum, reason)]
    decisions += [_decide_head(cfg, machine, batch, vocab_size)]
    values = {d.key: d.value for d in decisions if _get(given, d.key) == "auto"}
    sized = given.with_values(values, "auto")
    return SizedRun(sized, world_size, tuple(d for d in decisions if d.key in values), _without_effect(sized, machine))


def split_batch(cfg: RunConfig, world_size: int, *, has_gpu: bool) -> tuple[int, int, str]:
    """Micro-batch and accumulation whose product over all processes is exactly the effective batch."""
    train, total = cfg.train, cfg.train.effective_batch_size
    batch, accum = train.batch_size, train.grad_accum
    given = {name: n for name, n in (("batch_size", batch), ("grad_accum", accum)) if isinstance(n, int)}
    unit = world_size * math.prod(given.values())
    if total % unit or (len(given) == 2 and total != unit):
        made = " x ".join([*(f"{name} {n}" for name, n in given.items()), f"{world_size} process(es)"])
        low = total // unit * unit
        raise _inexact(cfg, made, [unit] if len(given) == 2 else [low, low + unit])
    share = total // world_size
    if isinstance(batch, int) and isinstance(accum, int):
        return batch, accum, "as given"
    if isinstance(batch, int):
        return batch, share // batch, f"{share} rows a process in pieces of {batch}"
    if isinstance(accum, int):
        return share // accum, accum, f"{share} rows a process in {accum} pieces"
    tokens = TOKENS_PER_MICRO_BATCH["gpu" if has_gpu else "cpu"]
    room = max(1, tokens // cfg.model.max_seq_len)
    rows = max(n for n in range(1, share + 1) if share % n == 0 and n <= room)
    return rows, share // rows, f"largest divisor of {share} whose rows stay within {tokens} tokens"


def _inexact(cfg: RunConfig, made: str, near: list[int]) -> ConfigError:
    names = " or ".join(str(n) for n in near if n > 0)
    other = "leave batch_size and grad_accum on auto" if " x " in made else "use another number of processes"
    return ConfigError(
        f"effective batch {cfg.train.effective_batch_size} cannot be split exactly over {made}",
        where=f"{cfg.origins.get('train.effective_batch_size', 'default')} train.effective_batch_size",
        fix=f"set train.effective_batch_size to {names}, or {other}",
    )


def _decide_numerics(cfg: RunConfig, machine: Machine) -> list[Decision]:
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
    why = "flash attention skips the gaps" if has_varlen else "without a varlen kernel packing costs more than it saves"
    if cfg.tuning.backend == "unsloth":
        has_varlen, why = False, "unsloth's attention does not keep rows apart that are packed here"
    return [
        precision,
        attn,
        Decision("train.packing", has_varlen, why),
        Decision("train.optim", "adamw_torch_fused", "one kernel a step, no copy of the gradients"),
        Decision("train.dataloader_pin_memory", bool(gpus), "page-locked memory speeds copies to a GPU only"),
    ]


def _without_effect(cfg: RunConfig, machine: Machine) -> tuple[str, ...]:
    if cfg.train.dataloader_pin_memory is True and not machine.gpus:
        return ("train.dataloader_pin_memory has no effect without a GPU",)
    return ()


def _decide_rate(cfg: RunConfig) -> Decision:
    rate = RATES[cfg.tuning.mode, cfg.task_mode]
    return Decision("train.learning_rate", rate, f"usual peak rate of {cfg.tuning.mode} {cfg.task_mode}")


def _decide_head(cfg: RunConfig, machine: Machine, batch: int, vocab_size: int | None) -> Decision:
    wanted, key = cfg.train.loss_head, "train.loss_head"
    if wanted == "liger" and (not machine.gpus or find_spec("liger_kernel") is None):
        raise MachineError(
            "the liger loss head needs a GPU and the package liger-kernel",
            where=f"{cfg.origins.get(key, 'train')} {key}",
            fix="leave train.loss_head on auto",
        )
    if cfg.tuning.backend == "unsloth":
        return Decision(key, "standard", "unsloth puts a loss of its own into the model")
    vocab = vocab_size or ASSUMED_VOCAB
    scores_bytes = batch * cfg.model.max_seq_len * vocab * 4
    size = format_bytes(scores_bytes) + ("" if vocab_size else f" at most, for a vocabulary of {vocab} or less")
    if machine.gpus and vocab > CHUNKED_WINS_VOCAB:
        return Decision(key, "chunked", f"a vocabulary of {vocab} on a GPU: whole scores would crowd out the batch")
    if scores_bytes > LARGE_SCORES_BYTES:
        return Decision(key, "chunked", f"whole scores of one piece would take {size}")
    return Decision(key, "standard", f"scores of one piece take {size}; no recomputation needed")


def _get(cfg: RunConfig, dotted: str) -> Any:
    value: Any = cfg
    for part in dotted.split("."):
        value = getattr(value, part)
    return value
