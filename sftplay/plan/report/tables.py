"""The lines of a plan as `make plan` prints them; docs/plan.md says what each one means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from sftplay.plan.memory.forecast import LOAD, MARGIN, RUNTIME, Forecast
from sftplay.units import GIB, format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from sftplay.plan.report.advice import Suggestion
    from sftplay.plan.report.compare import Row
    from sftplay.plan.report.run_cost import Workload

LABELS = {
    "weights": "weights",
    "adapters": "adapters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations kept",
    "layer": "one layer at work",
    "head": "loss head",
    "optimizer step": "copy of the gradients",
    "mask": "attention mask",
    "buckets and sharding": "buckets and sharding",
    "workspace": "cuBLAS workspaces",
    RUNTIME: "process itself",
    MARGIN: "margin of the estimate",
}

PHASES = {
    LOAD: "while the model is opened and split",
    "head": "in the loss",
    "layer": "in a layer's backward pass",
    "step": "in the optimizer step",
}


def label(seen: Forecast, name: str, *, labels: Mapping[str, str] = LABELS) -> str:
    """Return what `make plan` calls a component, or with PHASES a phase; the task's own words come first."""
    task = seen.setting.task
    return task.labels[name] if task and name in task.labels else labels[name]


VERDICTS = {
    "fits": "fits",
    "tight": "tight: fits by the estimate, but not with its margin",
    "does_not_fit": "does not fit",
}


def describe_model(seen: Forecast) -> Iterator[str]:
    """What is tuned, on what."""
    setting = seen.setting
    shape, device = setting.shape, setting.device
    yield f"model       {shape.name}: {format_count(shape.total_params)} parameters, {shape.layers} layers"
    if shape.vision_params:
        yield f"            and a vision tower of {format_count(shape.vision_params)}"
    for what in shape.unmodelled:
        yield f"            not modelled: {what}; the margin is wider for it"
    count = f"{device.count} x " if device.count > 1 else ""
    limit = "of all of it" if device.budget_bytes < device.free_bytes else "what is free now"
    free = f"{format_bytes(device.budget_bytes)} to plan with ({limit})"
    yield f"device      {count}{device.name}, {format_bytes(device.total_bytes)} each: {free}"
    yield f"processes   {setting.world_size} ({setting.strategy})"


def describe_memory(seen: Forecast) -> Iterator[str]:
    """A line for each component on one device, the sum, the budget and the verdict."""
    for name, size in seen.components.items():
        if size:
            yield f"  {label(seen, name):24} {size / GIB:9.3f} GiB"
    yield f"  {'peak, ' + label(seen, seen.peak_phase, labels=PHASES):34} = {seen.peak_bytes / GIB:.3f} GiB"
    if seen.host_bytes:
        yield f"  {'on the host':24} {seen.host_bytes / GIB:9.3f} GiB"
    yield f"  {'budget':24} {seen.budget_bytes / GIB:9.3f} GiB: {VERDICTS[seen.verdict]}"


def describe_phases(seen: Forecast) -> Iterator[str]:
    """What each phase of a step takes in all, without process and margin."""
    yield "in each phase"
    for name, parts in seen.footprint.phases.items():
        yield f"  {label(seen, name, labels=PHASES):36} {sum(parts.values()) / GIB:9.3f} GiB"


def describe_workload(work: Workload) -> Iterator[str]:
    """Steps, tokens, disk and time."""
    if work.steps is None:
        yield f"steps       not known: {work.steps_reason}"
    else:
        tokens = f", {format_count(work.tokens)} tokens at most" if work.tokens is not None else ""
        yield f"steps       {work.steps}{tokens} ({work.steps_reason})"
    yield f"disk        {format_bytes(work.checkpoint_bytes)} a checkpoint, {format_bytes(work.disk_bytes)} in all"
    if work.seconds is not None:
        yield f"time        about {format_seconds(work.seconds)}: {work.time_basis}"
    else:
        yield f"time        not estimated: {work.time_basis}"


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
