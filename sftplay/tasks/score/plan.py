"""Task score in the plan: where its models lie, what fits, all layouts side by side, and its words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError
from sftplay.plan.devices.layout import DEVICES, PLACEMENT, layout_of, name_devices
from sftplay.plan.memory.forecast import Forecast, Hardware
from sftplay.plan.memory.row_lengths import RowLengths
from sftplay.plan.report.advice import Step, Suggestion, added_up, first_that_fit, step_to, steps_of
from sftplay.plan.report.run_cost import Workload, workload_of
from sftplay.plan.report.tables import label
from sftplay.plan.report.task_report import Sizing, TaskReport
from sftplay.plan.shape.model_shape import ModelShape
from sftplay.plan.sizing.decisions import Decision, Decisions
from sftplay.plan.sizing.placement import STRATEGY, planned_strategy
from sftplay.plan.sizing.task_sizing import SizedRun, TaskSizing, forecast_one_row
from sftplay.tasks.grpo.memory import forecast_sampling
from sftplay.tasks.grpo.plan import decide_rows_at_once
from sftplay.tasks.score.memory import Episodes, held_by, read_episodes
from sftplay.tasks.score.spec import broken_score_rules, broken_shard_rules
from sftplay.units import GIB, format_bytes

REF = f"{DEVICES}.ref"


@dataclass(frozen=True)
class Candidate:
    """Values of keys that make a layout."""

    placement: str
    ref_on_cpu: bool = False

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.placement}, reference on the CPU" if self.ref_on_cpu else self.placement

    @property
    def values(self) -> dict[str, Any]:
        """By config key."""
        split = {STRATEGY: "fsdp"} if self.placement == "sharded" else {}
        return {PLACEMENT: self.placement, **({REF: "cpu"} if self.ref_on_cpu else {}), **split}


def candidates(cfg: RunConfig, hardware: Hardware) -> list[Candidate]:
    """Layouts that these devices and this number of processes allow, the cheapest first."""
    names, is_one = ["shared"], hardware.world_size == 1
    if is_one and hardware.gpus >= 2:
        names.append("roles")
    if is_one and hardware.gpus >= 4:
        names.append("roles4")
    wanted = "sharded" if cfg.cluster.strategy == "fsdp" else cfg.score.placement
    if not is_one and can_split(cfg):
        names.append("sharded")
    names = [wanted] if wanted != "auto" else names
    if wanted == "auto" and cfg.score.devices.guide != "auto":
        names = [name for name in names if name != "shared"] or ["roles"]
    # Switched off, an adapter leaves the reference: there is none that could lie elsewhere.
    moves_ref = cfg.tuning.mode == "full" and cfg.score.devices.ref == "auto" and hardware.device.is_gpu
    found = []
    for name in names:
        found.append(Candidate(name))
        if moves_ref and name in ("shared", "roles"):
            found.append(Candidate(name, ref_on_cpu=True))
    return found


def can_split(cfg: RunConfig) -> bool:
    """Whether the config's models could be in shards."""
    tried = cfg.with_values({PLACEMENT: "sharded"}, "placement")
    return not any(broken_shard_rules(tried))


def choose_placement(cfg: RunConfig, shape: ModelShape | None, *, hardware: Hardware) -> Decisions:
    """Placement and the reference's device, where they are open; nothing for another task.

    Raises:
        ConfigError: devices contradict the placement or the number of processes.
        MachineError: the machine lacks a GPU that is named.
    """
    open_ = candidates(cfg, hardware)
    if open_:
        placement: Any = open_[0].placement
        layout_of(cfg, placement=placement, gpus=hardware.gpus, processes=hardware.world_size)
    if shape is None:
        why = "the model's shape is not known here, so nothing says that it must be separated"
        return {PLACEMENT: Decision(open_[0].placement, why)}
    seen = {each: look(cfg, shape, hardware=hardware, candidate=each) for each in open_}
    chosen = next((each for each, look_ in seen.items() if look_.verdict != "does_not_fit"), None)
    if chosen is None:
        chosen = min(seen, key=lambda each: seen[each].peak_bytes)
        why = f"no layout fits; this one comes nearest, with {_filled(seen[chosen])}"
    else:
        passed = [f"{each.name} takes {_filled(seen[each])}" for each in open_[: open_.index(chosen)]]
        why = "; ".join([f"{_filled(seen[chosen])} on the fullest device", *passed])
    return {key: Decision(value, why) for key, value in chosen.values.items()}


def look(cfg: RunConfig, shape: ModelShape, *, hardware: Hardware, candidate: Candidate) -> Forecast:
    """The forecast of a layout with one row at a time."""
    tried = cfg.with_values(candidate.values, "placement")
    return forecast_one_row(tried, shape, hardware=hardware, strategy=planned_strategy(tried, hardware.world_size))


def _filled(seen: Forecast) -> str:
    return f"{format_bytes(seen.peak_bytes)} of {format_bytes(seen.budget_bytes)}"


EXACT = ("train.gradient_checkpointing", "train.optim=adamw_torch_fused")
"""Changes that cost time or nothing, and that go with models in shards."""


def suggest_for_episodes(cfg: RunConfig, shape: ModelShape, *, sizing: Sizing) -> list[Suggestion]:
    """Changes with which one row a micro-batch fits; where no single one does, all of them added up in order.

    `cfg` is as the user wrote it, with its `auto`.
    """
    sized = sizing(cfg, shape=shape)
    assert sized.forecast is not None
    hardware = Hardware(sized.forecast.setting.device, sized.world_size)
    steps = [_released(step, cfg) for step in steps_of(sized.cfg, hardware)]
    exact = [step for step in steps if step.change.startswith(EXACT)]
    others = [step for step in steps if step not in exact]
    split = list(_split(cfg, sized))
    return first_that_fit(
        [*exact, *split, *others],
        lambda tried: _attempt(cfg, shape, steps=tried, sizing=sizing),
        together=[*added_up([*exact, *split]), *added_up(steps)],
    )


def _attempt(cfg: RunConfig, shape: ModelShape, *, steps: list[Step], sizing: Sizing) -> Suggestion | None:
    changed = cfg.with_values({key: value for step in steps for key, value in step.values.items()}, "suggestion")
    if any(broken_score_rules(changed)):
        return None
    try:
        sized = sizing(changed, shape=shape)
    except ConfigError:  # the change contradicts the number of processes
        return None
    assert sized.forecast is not None
    setting = sized.forecast.setting
    hardware = Hardware(setting.device, setting.world_size)
    seen = forecast_one_row(sized.cfg, shape, hardware=hardware, strategy=setting.strategy)
    return Suggestion(", ".join(step.change for step in steps), seen.peak_bytes, seen.verdict == "fits")


def _split(cfg: RunConfig, sized: SizedRun) -> Iterator[Step]:
    """Models in shards, where the config as it is written leaves them out."""
    is_open = cfg.score.placement == "auto" and cfg.cluster.strategy == "auto"
    if is_open or sized.cfg.score.placement == "sharded":
        return
    if can_split(cfg.with_values({STRATEGY: "auto", "train.precision": sized.cfg.train.precision}, "suggestion")):
        yield step_to({PLACEMENT: "sharded", **({STRATEGY: "fsdp"} if cfg.cluster.strategy == "ddp" else {})})


def _released(step: Step, cfg: RunConfig) -> Step:
    """The step with the layout left to the kit, where what is written for it forbids the step."""
    if not any(broken_score_rules(cfg.with_values(step.values, "suggestion"))):
        return step
    keys = (PLACEMENT, STRATEGY)
    free = {key: "auto" for key in keys if cfg.get_value(key) in ("sharded", "fsdp")}
    return Step(", ".join([step.change, *(f"{key}=auto" for key in free)]), {**step.values, **free})


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
        return ", ".join(f"{label(self.forecast, name)} {size / GIB:.1f}" for name, size in largest)


def compare_layouts(cfg: RunConfig, shape: ModelShape, *, hardware: Hardware) -> list[LayoutRow]:
    """All layouts that these devices allow; recommended is the first that fits of the config's own tuning, else of the
    next cheaper one."""
    rows = list(_layout_rows(cfg, shape, hardware=hardware))
    wanted = MODES[MODES.index(cfg.tuning.mode) :]
    fitting = [row for row in rows if row.mode in wanted and row.forecast.verdict == "fits"]
    best = min(fitting, key=lambda row: wanted.index(row.mode), default=None)
    return [replace(row, is_recommended=row is best) for row in rows]


def _layout_rows(cfg: RunConfig, shape: ModelShape, *, hardware: Hardware) -> Iterator[LayoutRow]:
    gpus = max(1, hardware.gpus)
    for mode in MODES:
        tuned = cfg.with_values({"tuning.mode": mode, PLACEMENT: "auto", REF: "auto", STRATEGY: "auto"}, "compare")
        # Processes that each hold everything, then one process with several devices.
        for processes in sorted({gpus, 1}, reverse=True):
            own = replace(hardware, world_size=processes)
            for each in candidates(tuned, own):
                if processes == gpus or each.placement != "shared":
                    yield LayoutRow(mode, each, look(tuned, shape, hardware=own, candidate=each))


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
    """Yield the layout of a plan, and the peak of each device where it has several."""
    episodes, setting = seen.setting.task, seen.setting
    assert isinstance(episodes, Episodes)
    held = name_devices(held_by(episodes, setting.execution), is_gpu=setting.device.is_gpu)
    parts = "; ".join(f"{', '.join(each)} on {device}" for device, each in held.items())
    if episodes.layout.is_split:
        names = [part for each in held.values() for part in each]
        split, whole = (", ".join(p for p in names if (p in SPLIT_PARTS) is so) for so in (True, False))
        parts = f"a part of {split} in each of {setting.world_size} processes{f'; {whole} whole in each' * bool(whole)}"
    yield f"layout      {episodes.layout.placement}: {parts}"
    yield f"            {seen.sampled} answers drawn at a time by each process"
    if seen.by_device:
        yield f"            {_on_devices(seen)} GiB; the lines below are of the fullest"


def _on_devices(seen: Forecast) -> str:
    peaks = seen.device_peaks
    if len(peaks) == 1:
        return f"{seen.peak_bytes / GIB:.1f}"
    return ", ".join(f"{name} {peaks[name] / GIB:.1f}" for name in sorted(peaks))


def answers_of_drawing(cfg: RunConfig) -> int:
    """Answers of one turn that all processes draw before they learn from them."""
    return cfg.train.effective_batch_size * cfg.score.steps_per_generation


class ScorePlan(TaskSizing, TaskReport):
    """Two models, or one with two adapters, play episodes and learn from them."""

    unit = "episodes"
    splits_by_strategy = False

    def memory(self, cfg: RunConfig, *, hardware: Hardware) -> Episodes:
        return read_episodes(cfg, gpus=hardware.gpus, processes=hardware.world_size)

    def choose_placement(self, cfg: RunConfig, shape: ModelShape | None, *, hardware: Hardware) -> Decisions:
        return choose_placement(cfg, shape, hardware=hardware)

    def fixed_strategy(self, cfg: RunConfig) -> Decision | None:
        if cfg.score.placement == "sharded":
            return Decision("fsdp", "score.placement sharded splits both models by torch itself")
        return Decision("ddp", f"score.placement {cfg.score.placement} has both models whole")

    def fixed_head(self, cfg: RunConfig) -> Decision | None:
        return Decision("chunked", "log-probabilities of actions are taken in chunks of tokens")

    def decide_sampling(self, cfg: RunConfig, shape: ModelShape | None, *, hardware: Hardware) -> Decisions:
        look = forecast_sampling(cfg, shape, hardware=hardware) if shape is not None else None
        share = max(1, answers_of_drawing(cfg) // hardware.world_size)
        return {"score.generation_rows": decide_rows_at_once(share, look)}

    def rows_sampled(self, cfg: RunConfig) -> int:
        return cfg.score.generation_rows or 0

    def lengths(self, cfg: RunConfig) -> Iterator[tuple[str, int, int]]:
        yield "model.max_seq_len", cfg.row_tokens, cfg.score.max_new_tokens + cfg.score.max_hint_tokens

    def steps(self, cfg: RunConfig) -> tuple[int, str] | None:
        steps, each = cfg.score.stage1_steps + cfg.score.stage2_steps, cfg.score.steps_per_rollout
        drawings = f"; {math.ceil(steps / each)} drawings of {answers_of_drawing(cfg)} episodes" if each > 1 else ""
        return steps, f"score.stage1_steps and score.stage2_steps{drawings}"

    def size(self, cfg: RunConfig, sizing: Sizing, *, shape: ModelShape, world_size: int, is_free: bool) -> SizedRun:
        """One process is taken where nobody named a number and the parts need several GPUs."""
        may_be_one = is_free and world_size > 1
        if may_be_one and cfg.score.placement in ("roles", "roles4"):
            world_size = 1
        sized = sizing(cfg, shape=shape, world_size=world_size)
        seen = sized.forecast
        if may_be_one and cfg.score.placement == "auto" and seen is not None and seen.verdict == "does_not_fit":
            one = sizing(cfg, shape=shape, world_size=1)
            return one if one.forecast is not None and one.forecast.peak_bytes < seen.peak_bytes else sized
        return sized

    def suggest(self, cfg: RunConfig, sized: SizedRun, *, sizing: Sizing, hardware: Hardware) -> list[Suggestion]:
        assert sized.forecast is not None
        return suggest_for_episodes(cfg, sized.forecast.setting.shape, sizing=sizing)

    def workload(self, cfg: RunConfig, seen: Forecast, *, lengths: RowLengths | None = None) -> Workload:
        work = workload_of(cfg, seen.setting, lengths=lengths)
        return replace(work, tokens=None)  # an episode is three texts, each as long as the models make it

    def compare(self, cfg: RunConfig, shape: ModelShape, *, hardware: Hardware) -> tuple[list[Any], Iterator[str]]:
        rows = compare_layouts(cfg, shape, hardware=hardware)
        return rows, describe_layouts(rows)

    def describe_tokens(self, cfg: RunConfig, planned: int) -> str:
        return f"prompts and answers of {planned} tokens together"

    def describe_sampling(self, seen: Forecast, plan: dict[str, Any]) -> Iterator[str]:
        return describe_layout(seen)


PLAN = ScorePlan()
