"""The lines of a plan as `make plan` prints them; docs/plan.md says what each one means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sftplay.plan.memory.forecast import LOAD, MARGIN, RUNTIME, Forecast
from sftplay.plan.report.advice import Suggestion
from sftplay.plan.report.compare import Row
from sftplay.plan.report.run_cost import Workload
from sftplay.tasks.grpo.memory import CACHE, DRAW, ENGINE, REFERENCE, SCORE, cache_bytes
from sftplay.tasks.hrm.memory import FP32, PuzzleModelShape
from sftplay.tasks.score.memory import COMPARE, CRITIC, GUIDE, START, VALUE
from sftplay.units import GIB, format_bytes, format_count, format_seconds

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
    CACHE: "keys and values of completions",
    REFERENCE: "model to compare with",
    ENGINE: "vLLM's share",
    "table": "puzzle embeddings",
    "collected table": "all of them, to be written",
    "average": "averaged weights",
    "carry": "states between segments",
    "second pass": "a look at the next segment",
    CRITIC: "critic and its slow copy",
    VALUE: "value network",
    "workspace": "cuBLAS workspaces",
    RUNTIME: "process beside it",
    MARGIN: "margin of the estimate",
}

PHASES = {
    LOAD: "while the model is opened and split",
    START: "at the start, while the solver is whole",
    DRAW: "while completions are drawn",
    SCORE: "while completions are scored without gradients",
    "segment": "while a segment runs forward",
    "evaluation": "in the evaluation",
    "checkpoint": "while a checkpoint is written",
    COMPARE: "while the reference scores actions",
    f"{GUIDE}head": "in the guide's loss",
    f"{GUIDE}layer": "in a layer's backward pass of the guide",
    "head": "in the loss",
    "layer": "in a layer's backward pass",
    "step": "in the optimizer step",
}

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
    yield f"device      {count}{device.name}, {format_bytes(device.total_bytes)} each: {_free(seen)}"
    yield f"processes   {setting.world_size} ({setting.strategy})"


def _free(seen: Forecast) -> str:
    device = seen.setting.device
    limit = "of all of it" if device.budget_bytes < device.free_bytes else "what is free now"
    return f"{format_bytes(device.budget_bytes)} to plan with ({limit})"


def describe_memory(seen: Forecast) -> Iterator[str]:
    """A line for each component on one device, the sum, the budget and the verdict."""
    for name, size in seen.components.items():
        if size:
            yield f"  {LABELS[name]:24} {size / GIB:9.3f} GiB"
    yield f"  {'peak, ' + PHASES[seen.peak_phase]:34} = {seen.peak_bytes / GIB:.3f} GiB"
    if seen.host_bytes:
        yield f"  {'on the host':24} {seen.host_bytes / GIB:9.3f} GiB"
    yield f"  {'budget':24} {seen.budget_bytes / GIB:9.3f} GiB: {VERDICTS[seen.verdict]}"


def describe_drawing(seen: Forecast, plan: Mapping[str, Any]) -> Iterator[str]:
    """Groups, and what each phase of a step takes; nothing for a task that draws no completions."""
    rollout = seen.setting.rollout
    if rollout is None:
        return
    drawing, group = plan["generation_batch_size"], plan["num_generations"]
    prompts = f"{drawing // group} prompt{'s' if drawing > group else ''}"
    yield f"groups      {prompts} x {group} completions = {drawing} a drawing, by {rollout.engine}"
    yield f"            {seen.drawn} at a time on each process"
    yield f"            prompts of {rollout.prompt_tokens} tokens, completions of {rollout.completion_tokens}, at most"
    shape, execution = seen.setting.shape, seen.setting.execution
    full = cache_bytes(shape, execution, completions=seen.drawn, tokens=rollout.tokens)
    for name, parts in seen.footprint.phases.items():
        cache = parts.get(CACHE, 0.0)
        held = f", {cache / GIB:.3f} GiB of it keys and values" if cache else ""
        if 0 < cache < full:  # the prompts take more at the beginning than everything does at the end
            held += f", {full / GIB:.3f} GiB at full length"
        yield f"  {PHASES[name]:48} {sum(parts.values()) / GIB:9.3f} GiB{held}"


def describe_phases(seen: Forecast) -> Iterator[str]:
    """What each phase of a step takes in all, without process and margin."""
    yield "in each phase"
    for name, parts in seen.footprint.phases.items():
        yield f"  {PHASES[name]:36} {sum(parts.values()) / GIB:9.3f} GiB"


def describe_table(seen: Forecast) -> Iterator[str]:
    """The puzzle embeddings and what sharding saves; nothing where there is at most one."""
    shape, processes = seen.setting.shape, seen.setting.world_size
    if not isinstance(shape, PuzzleModelShape) or shape.puzzles.table <= shape.puzzles.embedding:
        return
    puzzles = shape.puzzles
    whole, held = (FP32 * each for each in (puzzles.table, puzzles.held(processes)))
    yield f"table       {puzzles.grid.identifiers:,} puzzle embeddings of {puzzles.embedding} numbers"
    sharded = FP32 * puzzles.table_share(processes)
    if processes == 1:
        yield f"            {format_bytes(whole)}; several processes could share it out"
        return
    saved = f"{format_bytes(whole)} whole, {format_bytes(sharded)} sharded: {format_bytes(whole - sharded)} less"
    yield f"            on each process {saved} ({'whole' if held == whole else 'sharded'} here)"


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
    for each in suggestions:
        what = "fits" if each.fits else "still too large"
        rows = "one row" if each.batch_size == 1 else f"{each.batch_size} rows"
        yield f"  {each.change}: {format_bytes(each.peak_bytes)}, {what} ({rows} at a time)"


def describe_rows(rows: Sequence[Row]) -> Iterator[str]:
    """The comparison as a table; `<-` marks the recommended row."""
    yield f"{'mode':6} {'strategy':15} {'on each':>10} {'host':>10} {'budget':>10}  verdict"
    for row in rows:
        seen = row.forecast
        host = f"{seen.host_bytes / GIB:.1f} GiB" if seen.host_bytes else "-"
        sizes = f"{seen.peak_bytes / GIB:6.1f} GiB {host:>10} {seen.budget_bytes / GIB:6.1f} GiB"
        mark = "  <- recommended" if row.is_recommended else ""
        yield f"{row.mode:6} {row.strategy:15} {sizes}  {seen.verdict.replace('_', ' ')}{mark}"
