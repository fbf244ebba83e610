"""Which model a new config names: the largest of a short list that fits this machine by the plan, in a night."""

from __future__ import annotations

from dataclasses import dataclass

from sftplay.config.schema.run import RunConfig
from sftplay.control.model_shape import known_shape
from sftplay.machine.probe import Machine
from sftplay.plan.memory.row_lengths import RowLengths
from sftplay.plan.report.run_cost import workload_of
from sftplay.plan.sizing.size_run import size_run
from sftplay.units import format_bytes, format_seconds

MODELS = (
    "Qwen/Qwen2.5-7B-Instruct",
    "Qwen/Qwen3-4B-Instruct-2507",
    "Qwen/Qwen2.5-1.5B-Instruct",
    "Qwen/Qwen2.5-0.5B-Instruct",
    "HuggingFaceTB/SmolLM2-360M-Instruct",
    "HuggingFaceTB/SmolLM2-135M-Instruct",
)
"""Instruction-tuned models that need no accepted licence (Apache 2.0), the largest first."""

TOY = "builtin:tiny"
NIGHT_S = 8 * 3600.0


@dataclass(frozen=True)
class Choice:
    """A model, how it is tuned, and why."""

    name: str
    mode: str
    reason: str


@dataclass(frozen=True)
class _Tried:
    choice: Choice
    seconds: float


def choose_model(cfg: RunConfig, machine: Machine, *, lengths: RowLengths) -> Choice:
    """The largest model that fits and is through in a night, else the quickest that fits, else the built-in toy."""
    modes = ("lora", "qlora") if machine.gpus else ("lora",)
    tried = [found for name in MODELS for mode in modes if (found := _try(cfg, machine, name=name, mode=mode,
                                                                         lengths=lengths))]  # fmt: skip
    for each in tried:
        if each.seconds <= NIGHT_S:
            return each.choice
    if tried:
        quickest = min(tried, key=lambda each: each.seconds).choice
        return Choice(quickest.name, quickest.mode, f"{quickest.reason}; train.max_steps makes it shorter")
    return Choice(TOY, "lora", "no model of use fits into the memory here; this one shows the way only")


def _try(cfg: RunConfig, machine: Machine, *, name: str, mode: str, lengths: RowLengths) -> _Tried | None:
    tried = cfg.with_values({"model.name": name, "tuning.mode": mode}, "init")
    sized = size_run(tried, machine, shape=known_shape(tried), lengths=lengths)
    seen = sized.forecast
    if seen is None or seen.verdict != "fits":
        return None
    work = workload_of(sized.cfg, seen.setting, lengths=lengths)
    time = f", about {format_seconds(work.seconds)} in all" if work.seconds is not None else ""
    sizes = f"{format_bytes(seen.peak_bytes)} of {format_bytes(seen.budget_bytes)} planned"
    return _Tried(Choice(name, mode, f"fits this machine: {sizes}{time}"), work.seconds or 0.0)
