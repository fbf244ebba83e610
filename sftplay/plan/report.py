"""A plan for people: its tables and the cost of a run; a task changes what differs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from sftplay.config.run import RunConfig
from sftplay.plan.forecast import LOAD, MARGIN, RUNTIME, Forecast, Hardware, RowLengths, Setting
from sftplay.plan.memory_setup import trained_params
from sftplay.plan.shape import ModelShape
from sftplay.plan.sizing import SizedRun, find_sizing
from sftplay.units import GIB, format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from sftplay.plan.advice import Suggestion

COUNTED_BYTES = 2**28  # files up to this size are counted; larger ones would keep the answer waiting

LINE_FILES = (".jsonl", ".ndjson")

USED_SHARE = 0.35  # of a GPU's peak arithmetic that fine-tuning usually reaches

CPU_FLOPS_PER_CORE = 2e10  # what a core does in fp32 products of a middling size; half or double is usual


@dataclass(frozen=True)
class Workload:
    """Figures of a whole run."""

    steps: int | None
    steps_reason: str
    tokens: int | None
    checkpoint_bytes: int
    disk_bytes: int
    seconds: float | None
    time_basis: str


def estimate_workload(cfg: RunConfig, setting: Setting, *, lengths: RowLengths | None = None) -> Workload:
    """Estimate the workload of a config in which all is decided; `lengths` is what is known of its rows."""
    train = cfg.train
    steps, reason = _steps(cfg, lengths)
    row_tokens = lengths.mean if lengths else cfg.row_tokens
    tokens = round(steps * train.effective_batch_size * row_tokens) if steps is not None else None
    learners = setting.task.learners if setting.task else 1
    trained = learners * trained_params(setting.shape, setting.execution)
    checkpoint = int(trained * (setting.execution.trained_bytes + setting.execution.state_bytes))
    seconds, basis = _seconds(setting, tokens, rows=_described(cfg, lengths))
    if cfg.task.learns_from_rewards:
        seconds, basis = None, "it depends on the length of completions, which the model decides"
    # One more lies there while the newest is written, and the result at the end.
    disk = checkpoint * (train.save_total_limit + 1) + trained * setting.execution.trained_bytes
    if cfg.tuning.new_tokens.is_on or (cfg.model.merge_adapter and cfg.tuning.mode != "full"):
        # The run keeps a base of its own, in 16 bits as most are stored.
        disk += 2 * (setting.shape.total_params + setting.shape.vision_params)
    return Workload(steps, reason, tokens, checkpoint, disk, seconds, basis)


def _described(cfg: RunConfig, lengths: RowLengths | None) -> str:
    if lengths and not cfg.learns_documents and not cfg.task.learns_from_rewards:
        return f"rows of {lengths.mean:.0f} tokens, as they are"
    return find_sizing(cfg).describe_length(cfg)


def _steps(cfg: RunConfig, lengths: RowLengths | None) -> tuple[int | None, str]:
    train = cfg.train
    if train.max_steps:
        return train.max_steps, f"train.max_steps, {_described(cfg, lengths)}"
    if decided := find_sizing(cfg).steps(cfg):
        return decided
    if cfg.learns_documents and cfg.cpt.train_tokens is not None:
        return cfg.count_steps(cfg.cpt.train_tokens), f"cpt.train_tokens, {_described(cfg, lengths)}"
    rows = lengths.count if lengths else None
    path = Path(cfg.rows_path)
    is_counted = not cfg.learns_documents and path.suffix in LINE_FILES and path.is_file()
    if rows is None and is_counted and path.stat().st_size <= COUNTED_BYTES:
        with path.open("rb") as file:
            rows = sum(1 for line in file if line.strip())
    if rows is None:
        return None, "the rows are counted when the data are prepared"
    completions = rows * find_sizing(cfg).rows_per_record(cfg)
    # As the run counts them (`data.pipeline`): the decimal number that was written, not its binary neighbour.
    steps = max(1, math.ceil(completions * Fraction(str(train.epochs)) / train.effective_batch_size))
    kind = "blocks an epoch" if cfg.learns_documents else "prompts" if cfg.task.learns_from_rewards else "rows"
    return steps, f"{rows} {kind}, {_described(cfg, lengths)}"


def _seconds(setting: Setting, tokens: int | None, *, rows: str) -> tuple[float | None, str]:
    device = setting.device
    if tokens is None:
        return None, "the number of steps is not known"
    if device.is_gpu:
        if device.tflops is None:
            return None, f"the peak speed of {device.name} is not in the table"
        speed = device.tflops * 1e12 * USED_SHARE * setting.world_size
        basis = f"{USED_SHARE:.0%} of {device.tflops:g} TFLOP/s a GPU (data sheet), {rows}"
    else:
        speed = CPU_FLOPS_PER_CORE * device.cores
        basis = f"{CPU_FLOPS_PER_CORE / 1e9:g} GFLOP/s a core assumed, {rows}"
    return tokens * flops_per_token(setting) / speed, basis


def flops_per_token(setting: Setting) -> float:
    """Operations of one step per token in products with weights; those between queries and keys come to a few percent
    below some thousand tokens (PaLM, Chowdhery 2022, appendix B) and are left out."""
    shape, setup = setting.shape, setting.execution
    # A multiplication and an addition each: forward, once more where it is recomputed, and for the gradients of the
    # input and of the weight where that trains.
    passes = 2 + setup.checkpointing + setup.trains_all
    return float(2 * passes * (shape.product_params + shape.head_params))


LABELS = {
    "optimizer": "optimizer state",
    "activations": "activations kept",
    "layer": "one layer at work",
    "head": "loss head",
    "optimizer step": "copy of the gradients",
    "mask": "attention mask",
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
    return task.labels[name] if task and name in task.labels else labels.get(name, name)


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


Sizing = Callable[..., SizedRun]  # sizes a config for the machine in question; `shape` is that of its model


class TaskReport:
    """A task in the plan's text. Its `plan.py` holds one as PLAN, where it differs."""

    def unit(self, cfg: RunConfig) -> str:
        """Return what a step counts."""
        return "rows"

    def where_model(self, cfg: RunConfig) -> str:
        """Return the place that names the model, for an error about it."""
        return cfg.describe_origin("model.name", unset="model")

    def size(self, cfg: RunConfig, sizing: Sizing, *, shape: ModelShape, world_size: int, is_free: bool) -> SizedRun:
        """Size a config; with `is_free` nobody named the number of processes, and the task may take fewer."""
        return sizing(cfg, shape=shape, world_size=world_size)

    def suggest(self, cfg: RunConfig, sized: SizedRun, *, sizing: Sizing, hardware: Hardware) -> list[Suggestion]:
        """Suggest what would fit: of `cfg` as the user wrote it, and as it is `sized`."""
        from sftplay.plan.advice import suggest

        assert sized.forecast is not None
        return suggest(sized.cfg, sized.forecast.setting.shape, hardware=hardware)

    def workload(self, cfg: RunConfig, seen: Forecast, *, lengths: RowLengths | None = None) -> Workload:
        """Return steps, disk and time of a run."""
        return estimate_workload(cfg, seen.setting, lengths=lengths)

    def compare(self, cfg: RunConfig, shape: ModelShape, *, hardware: Hardware) -> tuple[list[Any], Iterator[str]]:
        """Compare what could be chosen: rows with `as_dict`, and the lines of their table.

        Raises:
            ConfigError: the task leaves no choice.
        """
        from sftplay.plan.advice import compare, describe_rows

        rows = compare(cfg, shape, hardware=hardware)
        return rows, describe_rows(rows)

    def describe_tokens(self, cfg: RunConfig, planned: int) -> str:
        """Describe the rows that memory is planned for."""
        if cfg.learns_documents:
            learned = "" if any(source.type == "chat" for source in cfg.datasets) else ", every one learned"
            return f"full blocks of {planned} tokens{learned}"
        limit = cfg.row_tokens
        shorter = f", the longest of these files (model.max_seq_len {limit})" if planned < limit else ""
        return f"rows of {planned} tokens{shorter}"

    def describe_sampling(self, seen: Forecast, plan: dict[str, Any]) -> Iterator[str]:
        """Yield lines about what the task alone has, above the decisions."""
        yield from ()

    def describe_phases(self, seen: Forecast) -> Iterator[str]:
        """Yield lines about memory by phase, below the memory of a step."""
        yield from ()


def find_report(cfg: RunConfig) -> TaskReport:
    """Find what the config's task answers, imported only now."""
    part = cfg.task.part("plan")
    return cast("TaskReport", part.PLAN) if part else TaskReport()
