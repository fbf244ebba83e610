"""The closed form's bytes of a traced step, and both beside each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oracle.cases import Case, TraceSettings
from oracle.record import recorded_peaks
from sftplay.plan.forecast import Size, estimate
from sftplay.plan.memory_setup import WORKSPACE_BYTES, Adapter, MemorySetup
from sftplay.plan.shape_from_config import shape_from_config


@dataclass(frozen=True)
class Compared:
    """Bytes of the phases by trace and by closed form; the allocator's own workspace is in neither."""

    traced: Mapping[str, float]
    closed: Mapping[str, float]

    @property
    def peak_error(self) -> float:
        """Closed form's peak over the trace's, less one."""
        return max(self.closed.values()) / max(self.traced.values()) - 1

    def errors(self, near: float = 0.95) -> dict[str, float]:
        """Of the phases that by either come within `near` of the trace's peak."""
        peak = max(self.traced.values())
        phases = [name for name in self.traced if max(self.traced[name], self.closed[name]) > near * peak]
        return {name: self.closed[name] / self.traced[name] - 1 for name in phases}


def by_closed_forms_phases(peaks: Mapping[str, int]) -> dict[str, int]:
    """A trace's peaks: head (scores, loss and its backward), layer (the layers' two directions), step."""
    layer = max(peaks["backward"], peaks["forward"])
    return {"head": max(peaks["head"], peaks["loss"]), "layer": layer, "step": peaks["step"]}


def traced_bytes(case: Case) -> dict[str, int]:
    """Bytes by phase of the closed form as recorded."""
    return by_closed_forms_phases(recorded_peaks(case))


def closed_bytes(case: Case) -> dict[str, float]:
    """The same by closed form."""
    settings, config = case.settings, case.config
    if settings.layers:
        config |= {"n_layer": settings.layers, "num_hidden_layers": settings.layers}
    size = Size(
        rows=settings.batch,
        seq=settings.seq,
        labelled=max(1, round(settings.labels_share * settings.batch * settings.seq)),
        accumulates=settings.micro_batches > 1,
    )
    found = estimate(shape_from_config(config, name=case.family), read_memory_setup(settings), size=size)
    return {phase: sum(parts.values()) - WORKSPACE_BYTES for phase, parts in found.phases.items()}


def read_memory_setup(settings: TraceSettings, **more: Any) -> MemorySetup:
    """What a trace of these settings runs; `more` replaces fields."""
    sizes = {"fp32": 4, "bf16": 2, "fp16": 2}
    is_wide = settings.method == "full" or settings.kbit_prepared
    weights = sizes[settings.base or ("fp32" if is_wide else "bf16")]
    has_autocast = settings.autocast != "fp32"
    compute = 2 if settings.method == "qlora" else sizes[settings.autocast]  # bitsandbytes' layer computes in 16 bits
    adapter = None
    if settings.method != "full":
        adapter = Adapter(
            rank=settings.r,
            targets=settings.targets,
            weight_bytes=sizes[settings.adapter],
            has_dropout=settings.dropout > 0,
            new_rows=settings.new_rows,
        )
    fields: dict[str, Any] = {
        "weight_bytes": weights,
        "compute_bytes": compute,
        "stream_bytes": weights,
        "four_bit": settings.method == "qlora",
        "double_quant": settings.double_quant,
        "has_autocast": has_autocast,
        "adapter": adapter,
        "checkpointing": settings.checkpointing,
        "attention": "eager" if settings.attention == "eager" else "efficient" if settings.padded else "flash",
        "repeats_kv": settings.padded,
        "is_masked": settings.padded,
        "head": "chunked" if settings.head == "chunked" else "standard",
        "logits_bytes": compute if has_autocast else weights,
        "is_foreach": settings.optimizer == "adamw",
        "holds_scores": settings.keeps_output,
    }
    return MemorySetup(**(fields | more))


def compare(case: Case) -> Compared:
    """The recorded trace and the closed form of one step."""
    return Compared(traced_bytes(case), closed_bytes(case))
