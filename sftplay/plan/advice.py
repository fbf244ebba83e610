"""What would fit where a run does not, and modes and strategies side by side."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sftplay.config.run import RunConfig
from sftplay.plan.forecast import STRATEGIES, Forecast, Hardware, Strategy
from sftplay.plan.shape import ModelShape
from sftplay.plan.sizing import find_sizing, forecast_one_row
from sftplay.units import GIB, format_bytes

SHORTEST = 128  # tokens below which shorter rows are no advice

ENOUGH = 5


@dataclass(frozen=True)
class Suggestion:
    """One change, or several together, and what it leads to."""

    change: str
    peak_bytes: int
    fits: bool
    batch_size: int = 1  # rows of a micro-batch that `peak_bytes` are for


@dataclass(frozen=True)
class Step:
    """A change of config values, or of the strategy the processes share the model by."""

    change: str
    values: dict[str, Any]
    strategy: Strategy | None = None


def suggest(cfg: RunConfig, shape: ModelShape, *, hardware: Hardware) -> list[Suggestion]:
    """Suggest changes with which one row a micro-batch fits; where no single one does, all of them added up in order.

    `cfg` has no `auto` besides its sizes, and is not one of two-turn episodes, which advise themselves.
    """
    steps = list(list_steps(cfg, hardware))
    usual: Strategy = "single" if hardware.world_size == 1 else "ddp"

    def attempt(tried: list[Step]) -> Suggestion:
        values = {key: value for step in tried for key, value in step.values.items()}
        changed = cfg.with_values(values, "suggestion") if values else cfg
        strategy = next((step.strategy for step in reversed(tried) if step.strategy), usual)
        seen = forecast_one_row(changed, shape, hardware=hardware, strategy=strategy)
        return Suggestion(", ".join(step.change for step in tried), seen.peak_bytes, seen.verdict == "fits")

    return first_that_fit(steps, attempt, combined=added_up(steps))


def first_that_fit(
    steps: Sequence[Step], attempt: Callable[[list[Step]], Suggestion | None], *, combined: Iterable[list[Step]]
) -> list[Suggestion]:
    """Return what fits of the steps alone, else the first that fits of those `combined`, else the last of these.

    An attempt is None where the steps contradict the config or each other.
    """
    single = [attempt([step]) for step in steps]
    if fitting := [found for found in single if found and found.fits]:
        return fitting[:ENOUGH]
    found: list[Suggestion] = []
    for tried in combined:
        seen = attempt(tried)
        found += [seen] if seen else []
        if seen and seen.fits:
            return [seen]
    return found[-1:]


def added_up(steps: Iterable[Step]) -> Iterator[list[Step]]:
    """Yield the first step, the first two, and so on; a later value of a key takes the place of an earlier one."""
    gathered: list[Step] = []
    for step in steps:
        gathered = [*(one for one in gathered if not set(one.values) & set(step.values)), step]
        yield gathered


def list_steps(cfg: RunConfig, hardware: Hardware) -> Iterator[Step]:
    """Yield changes that could make a run smaller, the cheapest first."""
    train, mode = cfg.train, cfg.tuning.mode
    if not train.gradient_checkpointing:
        yield step_to({"train.gradient_checkpointing": True})
    if train.loss_head == "standard":
        yield step_to({"train.loss_head": "chunked"})
    if train.optim == "adamw_torch":
        yield step_to({"train.optim": "adamw_torch_fused"})
    if train.optim in ("adamw_torch", "adamw_torch_fused", "paged_adamw_32bit") and hardware.device.is_gpu:
        yield step_to({"train.optim": "adamw_8bit"})
    if mode == "full":
        yield step_to({"tuning.mode": "lora"})
    if mode in ("full", "lora"):
        yield step_to({"tuning.mode": "qlora"})
    if hardware.world_size > 1 and find_sizing(cfg).splits_by_strategy:
        names: tuple[Strategy, ...] = ("zero2", "zero3", "fsdp")
        for name in names:
            shared = f"cluster.strategy={name}: the processes share the model out"
            yield Step(shared, {"cluster.strategy": name}, name)
        offloaded = "cluster.deepspeed=deepspeed_configs/zero3_offload.json: share it out and keep it on the host"
        yield Step(offloaded, {}, "zero3_offload")
    for key, length, room in find_sizing(cfg).lengths(cfg):
        while (length := length // 2) >= max(SHORTEST, room + 1):
            yield step_to({key: length})


def step_to(values: dict[str, Any]) -> Step:
    """Build the change to these values by their keys, as it is typed."""
    shown = {k: json.dumps(value) if value is None or isinstance(value, bool) else value for k, value in values.items()}
    return Step(", ".join(f"{key}={value}" for key, value in shown.items()), values)


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
        sizes = {name: getattr(seen, name) for name in ("peak_bytes", "host_bytes", "budget_bytes", "verdict")}
        place = {"mode": self.mode, "strategy": self.strategy, "world_size": seen.setting.world_size}
        return {**place, **sizes, "recommended": self.is_recommended}


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


def describe_suggestions(suggestions: Sequence[Suggestion]) -> Iterator[str]:
    """What to change, the cheapest first."""
    for suggestion in suggestions:
        what = "fits" if suggestion.fits else "still too large"
        rows = "one row" if suggestion.batch_size == 1 else f"{suggestion.batch_size} rows"
        yield f"  {suggestion.change}: {format_bytes(suggestion.peak_bytes)}, {what} ({rows} at a time)"


def describe_rows(rows: Sequence[Row]) -> Iterator[str]:
    """The comparison as a table; `<-` marks the recommended row."""
    yield f"{'mode':6} {'strategy':15} {'on each':>10} {'host':>10} {'budget':>10}  verdict"
    for row in rows:
        seen = row.forecast
        host = f"{seen.host_bytes / GIB:.1f} GiB" if seen.host_bytes else "-"
        sizes = f"{seen.peak_bytes / GIB:6.1f} GiB {host:>10} {seen.budget_bytes / GIB:6.1f} GiB"
        mark = "  <- recommended" if row.is_recommended else ""
        yield f"{row.mode:6} {row.strategy:15} {sizes}  {seen.verdict.replace('_', ' ')}{mark}"
