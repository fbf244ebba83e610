"""From `auto` to numbers and names: backend, precision, attention, loss head, packing, optimizer, rate, batch sizes.

What holds whatever the hardware: `batch_size * grad_accum * processes == effective_batch_size`, an explicit value is
never changed, and every choice comes with its reason. Below this module no config value is `auto`.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from sftplay.config.cluster import BACKEND
from sftplay.config.run import RunConfig
from sftplay.errors import MachineError
from sftplay.machine.probe import Machine
from sftplay.plan.memory.budget import find_device
from sftplay.plan.memory.forecast import Hardware
from sftplay.plan.memory.row_lengths import RowLengths, planned_tokens
from sftplay.plan.shape.model_shape import ModelShape
from sftplay.plan.sizing.decisions import (
    Decision,
    Decisions,
    choose_backend,
    decide_numerics,
    scaled_rate,
    without_effect,
)
from sftplay.plan.sizing.placement import STRATEGY, choose_strategy
from sftplay.plan.sizing.split import foresight, split_batch
from sftplay.plan.sizing.task_sizing import SizedRun, find_sizing
from sftplay.units import format_bytes

if TYPE_CHECKING:
    from sftplay.plan.memory.probe_fit import Fit

LOSS_HEAD, BATCH_SIZE, GRAD_ACCUM = "train.loss_head", "train.batch_size", "train.grad_accum"

LARGE_SCORES_BYTES = 2**31
"""From here on the scores of one micro-batch are computed in chunks: a tenth of the RAM these kits usually run in."""

ASSUMED_VOCAB = 128_000  # taken for a model whose config.json is not on this machine yet; few have more

CHUNKED_WINS_VOCAB = 32_000
"""Vocabulary above which holding all scores costs a GPU more than recomputing them in chunks."""


def size_run(
    cfg: RunConfig,
    machine: Machine,
    *,
    world_size: int = 1,
    vocab_size: int | None = None,
    shape: ModelShape | None = None,
    local_processes: int | None = None,
    fit: Fit | None = None,
    lengths: RowLengths | None = None,
) -> SizedRun:
    """Replace every `auto` by a number or a name.

    `shape` is the model's, None when it is not known before the download; `vocab_size` may be known without it.
    `local_processes` is how many of the `world_size` share this machine, None for all. `fit` is what a probe measured.
    `lengths` is what is known of the rows; without it every row counts as full.

    Raises:
        ConfigError: the effective batch cannot be reached exactly; both neighbours are named.
        MachineError: an explicit backend, precision, attention, loss head or hook cannot run here.
    """
    if cfg.cluster.comm.hook == "bf16":
        from sftplay.plan.sizing.communication import refuse_hook

        refuse_hook(cfg, machine, world_size=world_size)
    task, processes = find_sizing(cfg), local_processes or world_size
    task.refuse_machine(cfg, machine, world_size=world_size)
    hardware = Hardware(find_device(machine, processes), world_size, lengths)
    if shape is not None and (whole := task.size_whole(cfg, machine, shape=shape, hardware=hardware)):
        return whole
    first = {BACKEND: choose_backend(cfg, machine, world_size=world_size)}
    decided = fill_open(cfg, first)
    rest = decide_numerics(decided, machine, shape=shape) | task.decide_more(decided, machine)
    decided = fill_open(decided, rest)
    rest[LOSS_HEAD] = _decide_head(decided, machine, hardware=hardware, vocab_size=shape.vocab if shape else vocab_size)
    decided = fill_open(decided, rest)
    first |= task.choose_placement(decided, shape, hardware=hardware)
    decided = fill_open(decided, first)
    first[STRATEGY] = choose_strategy(decided, shape, hardware=hardware)
    decided = fill_open(decided, first)
    rest |= task.decide_sampling(decided, shape, hardware=hardware)
    decided = fill_open(decided, rest)
    estimate_for = None
    if shape is not None:
        if machine.gpus and cfg.train.loss_head == "auto" and task.fixed_head(cfg) is None:
            decided, rest[LOSS_HEAD] = _compare_heads(decided, shape, hardware=hardware)
        sampled = task.rows_sampled(decided)
        estimate_for = foresight(decided, shape, hardware=hardware, fit=fit, sampled=sampled)
    tokens, has_gpu = planned_tokens(decided, lengths), bool(machine.gpus)
    split = split_batch(decided, world_size, has_gpu=has_gpu, row_tokens=tokens, estimate_for=estimate_for)
    rest |= {BATCH_SIZE: Decision(split.rows, split.reason), GRAD_ACCUM: Decision(split.accum, split.reason)}
    sized = fill_open(decided, rest)
    notes = [*scaled_rate(sized), *task.notes(sized, shape), *without_effect(sized, machine)]
    seen = estimate_for(int(sized.train.batch_size)) if estimate_for else None
    if seen is None:
        notes.append(f"memory is not planned: the shape of {cfg.model.name} is not known here")
    elif seen.opens_on_host and seen.host_bytes * processes > machine.ram_available:
        need, free = format_bytes(seen.host_bytes * processes), format_bytes(machine.ram_available)
        where = f"{processes} processes open the model in the host's memory before they split it"
        notes.append(f"{where}: {need}, and {free} are free")
    decisions = {key: decision for key, decision in {**first, **rest}.items() if is_open(cfg, key)}
    return SizedRun(sized, world_size, decisions, tuple(notes), seen)


def fill_open(cfg: RunConfig, decisions: Decisions) -> RunConfig:
    """Return the config with decided values where it says `auto`."""
    values = {key: decision.value for key, decision in decisions.items() if is_open(cfg, key)}
    return cfg.with_values(values, "auto") if values else cfg


def is_open(cfg: RunConfig, key: str) -> bool:
    return cfg.get_value(key) in ("auto", None)


def _decide_head(cfg: RunConfig, machine: Machine, *, hardware: Hardware, vocab_size: int | None) -> Decision:
    wanted = cfg.train.loss_head
    if fixed := find_sizing(cfg).fixed_head(cfg):
        return fixed
    if wanted == "liger" and (not machine.gpus or importlib.util.find_spec("liger_kernel") is None):
        what, where = (
            "the liger loss head needs a GPU and the package liger-kernel",
            cfg.origins.get(LOSS_HEAD, "train"),
        )
        raise MachineError(what, where=f"{where} {LOSS_HEAD}", fix="leave train.loss_head on auto")
    if cfg.tuning.backend == "unsloth":
        return Decision("standard", "unsloth puts a loss of its own into the model")
    vocab = vocab_size or ASSUMED_VOCAB
    tokens = planned_tokens(cfg, hardware.lengths)
    rows = split_batch(cfg, hardware.world_size, has_gpu=bool(machine.gpus), row_tokens=tokens).rows
    scores_bytes = rows * tokens * vocab * 4
    size = format_bytes(scores_bytes) + ("" if vocab_size else f" at most, for a vocabulary of {vocab} or less")
    if machine.gpus and vocab > CHUNKED_WINS_VOCAB:
        return Decision("chunked", f"a vocabulary of {vocab} on a GPU: whole scores would crowd out the batch")
    if scores_bytes > LARGE_SCORES_BYTES:
        return Decision("chunked", f"whole scores of one micro-batch would take {size}")
    return Decision("standard", f"scores of one micro-batch take {size}; no recomputation needed")


def _compare_heads(cfg: RunConfig, shape: ModelShape, *, hardware: Hardware) -> tuple[RunConfig, Decision]:
    """Take whole scores unless chunks of them make room for a larger micro-batch, or for one at all."""
    seen, configs, tokens = {}, {}, planned_tokens(cfg, hardware.lengths)
    for head in ("standard", "chunked"):
        configs[head] = tried = cfg if cfg.train.loss_head == head else cfg.with_values({LOSS_HEAD: head}, "auto")
        estimate_for = foresight(tried, shape, hardware=hardware)
        split = split_batch(cfg, hardware.world_size, has_gpu=True, row_tokens=tokens, estimate_for=estimate_for)
        seen[head] = estimate_for(split.rows)
    whole, chunks = seen["standard"], seen["chunked"]
    if chunks.size.rows > whole.size.rows:
        sizes = f"{chunks.size.rows} rows a micro-batch instead of {whole.size.rows}"
        why = f"a vocabulary of {shape.vocab} in chunks leaves room for {sizes}"
        return configs["chunked"], Decision("chunked", why)
    if whole.verdict != "fits" and chunks.peak_bytes < whole.peak_bytes:
        saved = format_bytes(whole.peak_bytes - chunks.peak_bytes)
        return configs["chunked"], Decision("chunked", f"a vocabulary of {shape.vocab} in chunks takes {saved} less")
    why = "chunks would make room for no larger micro-batch, and compute scores twice"
    return configs["standard"], Decision("standard", why)
