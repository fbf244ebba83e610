"""The predicted peak of a measured row, from what its columns and its harness say."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.memory.harnesses import GENERIC, HARNESSES, NAMES, PEFT_TARGETS, Harness
from benchmarks.memory.measured_rows import MeasuredRow, NotModelledError
from sftplay.plan.devices import find_card
from sftplay.plan.find_shape import find_shape
from sftplay.plan.forecast import Device, Footprint, Size, estimate, find_share, runtime_bytes, standing_bytes
from sftplay.plan.memory_setup import Adapter, MemorySetup
from sftplay.plan.shape import ModelShape
from sftplay.units import GIB


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A peak in GiB, and the phase of a step that it lies in."""

    gib: float
    phase: str
    is_one_of_two: bool
    """True where the columns fit two code paths, and the row's card holds both."""


def predict(row: MeasuredRow) -> Prediction:
    """The peak as the row's harness would print it.

    Raises:
        NotModelledError: the model is unknown, or the closed form does not model it.
    """
    shape = find_shape(NAMES.get(row.model.lower(), row.model))
    if shape is None:
        raise NotModelledError("a model whose config.json is not in the table")
    if shape.experts:
        raise NotModelledError("a mixture of experts")
    harness = HARNESSES.get(row.harness, GENERIC)
    found = [_footprint(shape, execution, row) for execution in _executions(row, harness)]
    fitting = [each for each in found if each.peak_bytes <= _card_bytes(row.gpu)] or found[-1:]
    per_gpu = fitting[0].peak_bytes + (_process_bytes(row) if harness.counts_process else 0)
    total = per_gpu * (row.gpus if harness.counts_all_gpus else 1)
    return Prediction(gib=total / GIB, phase=fitting[0].peak_phase, is_one_of_two=len(fitting) > 1)


def _footprint(shape: ModelShape, execution: MemorySetup, row: MeasuredRow) -> Footprint:
    standing = standing_bytes(shape, execution)
    share = find_share(shape, execution, standing=standing, strategy=row.strategy, world_size=row.gpus)
    size = Size(rows=row.rows, seq=row.tokens)
    return estimate(shape, execution, size=size, standing=share.standing, communication=share.communication)


def _card_bytes(gpu: str) -> float:
    """Memory of the card that a row names, as its maker counts it; endless where the name has no number."""
    sizes = [word[:-2] for word in gpu.replace("-", " ").replace("/", " ").split() if word.endswith("GB")]
    return int(sizes[0]) * 1e9 if sizes and sizes[0].isdigit() else float("inf")


def _process_bytes(row: MeasuredRow) -> int:
    """What the process holds beside torch's allocator."""
    card = find_card(row.gpu.split("/")[0])
    capability = card.capability if card else (8, 0)
    return runtime_bytes(Device(row.gpu, 0, 0, True, capability), row.gpus)


def _executions(row: MeasuredRow, harness: Harness) -> list[MemorySetup]:
    """What may have run, the harness's own stock code first."""
    common = MemorySetup(
        weight_bytes=2,
        compute_bytes=2,
        stream_bytes=2,
        checkpointing=row.checkpointing,
        attention=row.attention,
        repeats_kv=harness.repeats_kv,
        holds_scores=harness.holds_scores,
        shifts_scores=harness.shifts_scores,
        holds_inputs=row.strategy.startswith("fsdp") and row.method in harness.reentrant,
        optimizer=row.optimizer,
        is_foreach=row.optimizer == "adamw",
    )
    if row.method == "full":
        wide = harness.full_bytes
        return [replace(common, weight_bytes=wide, compute_bytes=wide, stream_bytes=wide, logits_bytes=wide)]
    if row.method != "QLoRA":
        return [replace(common, has_autocast=harness.has_autocast, adapter=_adapter(row, harness))]
    # TRL leaves a model in 4 bits whose shards lie elsewhere as it is (sft_trainer.py, is_sharded_qlora).
    streams = (2,) if row.is_sharded else harness.qlora_stream_bytes
    return [
        replace(
            common,
            weight_bytes=harness.qlora_other_bytes,
            stream_bytes=stream,
            logits_bytes=harness.qlora_other_bytes,
            four_bit=True,
            double_quant=harness.double_quant and "no dq" not in row.quant,
            has_autocast=harness.qlora_autocast,
            adapter=_adapter(row, harness),
        )
        for stream in streams
    ]


def _adapter(row: MeasuredRow, harness: Harness) -> Adapter:
    targets = PEFT_TARGETS.get(row.rank, harness.targets) if row.harness == "peft-bench" else harness.targets
    return Adapter(rank=row.rank, targets=targets, has_dropout=harness.has_dropout, is_dora=row.method == "DoRA")
