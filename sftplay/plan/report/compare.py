"""Every way to tune a model on the devices at hand, side by side, and which one to take."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from sftplay.config.run import RunConfig
from sftplay.plan.memory.forecast import Forecast, Hardware
from sftplay.plan.memory.sharding import STRATEGIES, Strategy
from sftplay.plan.shape.model_shape import ModelShape
from sftplay.plan.sizing.task_sizing import forecast_one_row

MODES = ("full", "lora", "qlora")

WITHOUT_FOUR_BIT = ("zero1", "zero2", "zero2_offload", "zero3_offload", "fsdp_offload")
"""Strategies not offered for a 4-bit base: the first three share out an optimizer that is tiny for an adapter,
and bitsandbytes' codes cannot be moved to the host and back."""

RANK: tuple[Strategy, ...] = (
    "single", "ddp", "zero1", "zero2", "fsdp", "zero3", "zero2_offload", "zero3_offload", "fsdp_offload",
)  # fmt: skip
"""From the least communication to the most: the first that fits is the fastest."""


@dataclass(frozen=True)
class Row:
    """One mode under one strategy, with one row a micro-batch."""

    mode: str
    strategy: Strategy
    forecast: Forecast
    is_recommended: bool = False

    def as_dict(self) -> dict[str, Any]:
        seen = self.forecast
        return {
            "mode": self.mode,
            "strategy": self.strategy,
            "world_size": seen.setting.world_size,
            "peak_bytes": seen.peak_bytes,
            "host_bytes": seen.host_bytes,
            "budget_bytes": seen.budget_bytes,
            "verdict": seen.verdict,
            "recommended": self.is_recommended,
        }


def compare(cfg: RunConfig, shape: ModelShape, *, hardware: Hardware) -> list[Row]:
    """Return all rows that make sense here. Recommended is the config's own mode where some strategy fits it, else the
    nearest cheaper mode, under the strategy that communicates least."""
    rows = []
    for mode in MODES:
        tuned = cfg.with_values({"tuning.mode": mode}, "compare")
        for strategy in STRATEGIES if hardware.world_size > 1 else STRATEGIES[:1]:
            is_small = strategy in ("single", "ddp")
            if (mode == "qlora" and strategy in WITHOUT_FOUR_BIT) or not (hardware.device.is_gpu or is_small):
                continue
            alone = Hardware(hardware.device, 1) if strategy == "single" else hardware
            rows.append(Row(mode, strategy, forecast_one_row(tuned, shape, hardware=alone, strategy=strategy)))
    wanted = MODES[MODES.index(cfg.tuning.mode) :]
    using_all = [row for row in rows if hardware.world_size == 1 or row.strategy != "single"]
    best = min(
        (row for row in using_all if row.mode in wanted and row.forecast.verdict == "fits"),
        key=lambda row: (wanted.index(row.mode), RANK.index(row.strategy)),
        default=None,
    )
    return [replace(row, is_recommended=row is best) for row in rows]
