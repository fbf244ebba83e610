"""Every layout of two-turn episodes on the devices at hand, side by side: what each device holds, what does not fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sftplay.config.schema.run import RunConfig
from sftplay.plan.devices.layout import PLACEMENT
from sftplay.plan.memory.episodes import held_by, names_of
from sftplay.plan.memory.forecast import Forecast, Place
from sftplay.plan.report.tables import LABELS
from sftplay.plan.shape.model_shape import ModelShape
from sftplay.plan.sizing.placement import REF, STRATEGY, Candidate, candidates, look
from sftplay.units import GIB

MODES = ("full", "lora", "qlora")

SPLIT_PARTS = ("solver", "guide", "ref")
"""What `sharded` splits; the others are small."""

SAID = 3
"""Components that are named where a layout does not fit."""


@dataclass(frozen=True)
class LayoutRow:
    """One kind of tuning in one layout, with one row a micro-batch."""

    mode: str
    layout: Candidate
    forecast: Forecast
    is_recommended: bool = False

    def as_dict(self) -> dict[str, Any]:
        seen = self.forecast
        return {
            "mode": self.mode,
            "layout": self.layout.name,
            "world_size": seen.setting.world_size,
            "devices": seen.device_peaks,
            "host_bytes": seen.host_bytes,
            "budget_bytes": seen.budget_bytes,
            "verdict": seen.verdict,
            "why": self.why,
            "recommended": self.is_recommended,
        }

    @property
    def why(self) -> str:
        """The largest components of the fullest device, where they are too many."""
        if self.forecast.verdict == "fits":
            return ""
        largest = sorted(self.forecast.components.items(), key=lambda each: -each[1])[:SAID]
        return ", ".join(f"{LABELS[name]} {size / GIB:.1f}" for name, size in largest)


def compare_layouts(cfg: RunConfig, shape: ModelShape, *, place: Place) -> list[LayoutRow]:
    """All layouts that these devices allow; recommended is the first that fits of the config's own tuning, else of the
    next cheaper one."""
    rows = list(_rows(cfg, shape, place=place))
    wanted = MODES[MODES.index(cfg.tuning.mode) :]
    fitting = [row for row in rows if row.mode in wanted and row.forecast.verdict == "fits"]
    best = min(fitting, key=lambda row: wanted.index(row.mode), default=None)
    return [replace(row, is_recommended=row is best) for row in rows]


def _rows(cfg: RunConfig, shape: ModelShape, *, place: Place) -> Iterator[LayoutRow]:
    gpus = max(1, place.gpus)
    for mode in MODES:
        tuned = cfg.with_values({"tuning.mode": mode, PLACEMENT: "auto", REF: "auto", STRATEGY: "auto"}, "compare")
        # Processes that each hold everything, then one process with several devices.
        for processes in sorted({gpus, 1}, reverse=True):
            own = replace(place, world_size=processes)
            for each in candidates(tuned, own):
                if processes == gpus or each.placement != "shared":
                    yield LayoutRow(mode, each, look(tuned, shape, place=own, candidate=each))


def describe_layouts(rows: Sequence[LayoutRow]) -> Iterator[str]:
    """The comparison as a table in Markdown; `<-` marks the recommended row."""
    yield "| tuning | layout | processes | GiB on each device | host | budget | verdict |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for row in rows:
        seen = row.forecast
        host = f"{seen.host_bytes / GIB:.1f}" if seen.host_bytes else "-"
        why = f": {row.why}" if row.why else ""
        mark = " <- recommended" if row.is_recommended else ""
        cells = [
            row.mode, row.layout.name, str(seen.setting.world_size), _on_devices(seen), host,
            f"{seen.budget_bytes / GIB:.1f}", f"{seen.verdict.replace('_', ' ')}{why}{mark}",
        ]  # fmt: skip
        yield f"| {' | '.join(cells)} |"


def describe_layout(seen: Forecast) -> Iterator[str]:
    """The layout of a plan, and the peak of each device where it has several; nothing for another task."""
    episodes, setting = seen.setting.episodes, seen.setting
    if episodes is None:
        return
    held = names_of(held_by(episodes, setting.execution), is_gpu=setting.device.is_gpu)
    parts = "; ".join(f"{', '.join(each)} on {device}" for device, each in held.items())
    if episodes.layout.is_split:
        names = [part for each in held.values() for part in each]
        split, whole = (", ".join(p for p in names if (p in SPLIT_PARTS) is so) for so in (True, False))
        parts = f"a part of {split} in each of {setting.world_size} processes{f'; {whole} whole in each' * bool(whole)}"
    yield f"layout      {episodes.layout.placement}: {parts}"
    yield f"            {seen.drawn} answers drawn at a time by each process"
    if seen.by_device:
        yield f"            {_on_devices(seen)} GiB; the lines below are of the fullest"


def _on_devices(seen: Forecast) -> str:
    peaks = seen.device_peaks
    if len(peaks) == 1:
        return f"{seen.peak_bytes / GIB:.1f}"
    return ", ".join(f"{name} {peaks[name] / GIB:.1f}" for name in sorted(peaks))
