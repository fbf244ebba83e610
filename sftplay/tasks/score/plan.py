"""Task score in the plan: where its models lie, what fits, all layouts side by side, and its words."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError
from sftplay.plan.devices.layout import DEVICES, PLACEMENT, name_devices, resolve_layout
from sftplay.plan.memory.forecast import Forecast, Hardware
from sftplay.plan.memory.row_lengths import RowLengths
from sftplay.plan.report.advice import Step, Suggestion, added_up, first_that_fit, list_steps, step_to
from sftplay.plan.report.run_cost import Workload, estimate_workload
from sftplay.plan.report.tables import label
from sftplay.plan.report.task_report import Sizing, TaskReport
from sftplay.plan.shape.model_shape import ModelShape
from sftplay.plan.sizing.decisions import Decision, Decisions
from sftplay.plan.sizing.placement import STRATEGY, planned_strategy
from sftplay.plan.sizing.task_sizing import SizedRun, TaskSizing, forecast_one_row
from sftplay.tasks.grpo.memory import forecast_sampling
from sftplay.tasks.grpo.plan import decide_rows_at_once
from sftplay.tasks.score.memory import Episodes, find_parts, read_episodes
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
    """List the layouts that these devices and this number of processes allow, the cheapest first."""
    names, is_one = ["shared"], hardware.world_size == 1
    if is_one:
        names += ["roles"] * (hardware.gpus >= 2) + ["roles4"] * (hardware.gpus >= 4)
    elif can_shard(cfg):
        names.append("sharded")
    wanted = "sharded" if cfg.cluster.strategy == "fsdp" else cfg.score.placement
    if wanted != "auto":
        names = [wanted]
    elif cfg.score.devices.guide != "auto":
        names = [name for name in names if name != "shared"] or ["roles"]
    # Switched off, an adapter leaves the reference: there is none that could lie elsewhere.
    moves_ref = cfg.tuning.mode == "full" and cfg.score.devices.ref == "auto" and hardware.device.is_gpu
    return [
        Candidate(name, ref_on_cpu=on_cpu)
        for name in names
        for on_cpu in ((False, True) if moves_ref and name in ("shared", "roles") else (False,))
    ]


def can_shard(cfg: RunConfig) -> bool:
    """Whether the config's models could be in shards."""
    return not any(broken_shard_rules(cfg.with_values({PLACEMENT: "sharded"}, "placement")))


def forecast_layout(cfg: RunConfig, shape: ModelShape, *, hardware: Hardware, candidate: Candidate) -> Forecast:
    """Forecast a layout with one row at a time."""
    tried = cfg.with_values(candidate.values, "placement")
    return forecast_one_row(tried, shape, hardware=hardware, strategy=planned_strategy(tried, hardware.world_size))


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

    def as_line(self) -> str:
        """Return the row of a table in Markdown; `<-` marks the recommended one."""
        seen = self.forecast
        host = f"{seen.host_bytes / GIB:.1f}" if seen.host_bytes else "-"
        why, mark = f": {self.why}" * bool(self.why), " <- recommended" * self.is_recommended
        cells = [
            self.mode, self.layout.name, str(seen.setting.world_size), _format_peaks(seen), host,
            f"{seen.budget_bytes / GIB:.1f}", f"{seen.verdict.replace('_', ' ')}{why}{mark}",
        ]  # fmt: skip
        return f"| {' | '.join(cells)} |"

    @property
    def why(self) -> str:
        """The three largest components of the fullest device, where they are too many."""
        if self.forecast.verdict == "fits":
            return ""
        largest = sorted(self.forecast.components.items(), key=lambda component: -component[1])[:3]
        return ", ".join(f"{label(self.forecast, name)} {size / GIB:.1f}" for name, size in largest)


def describe_layout(seen: Forecast) -> Iterator[str]:
    """Yield the layout of a plan, and the peak of each device where it has several."""
    episodes, setting = seen.setting.task, seen.setting
    assert isinstance(episodes, Episodes)
    found = find_parts(episodes, setting.execution)
    held = name_devices(found, is_gpu=setting.device.is_gpu)
    parts = "; ".join(f"{', '.join(names)} on {device}" for device, names in held.items())
    if episodes.layout.is_split:
        names = [part for names in held.values() for part in names]
        sharded = [name for name in names if name in ("solver", "guide", "ref")]  # the others are small
        whole = ", ".join(name for name in names if name not in sharded)
        parts = f"a part of {', '.join(sharded)} in each of {setting.world_size} processes"
        parts += f"; {whole} whole in each" * bool(whole)
    yield f"layout      {episodes.layout.placement}: {parts}"
    yield f"            {seen.sampled} answers drawn at a time by each process"
    if seen.by_device:
        yield f"            {_format_peaks(seen)} GiB; the lines below are of the fullest"


def _format_peaks(seen: Forecast) -> str:
    peaks = seen.device_peaks
    if len(peaks) == 1:
        return f"{seen.peak_bytes / GIB:.1f}"
    return ", ".join(f"{name} {peaks[name] / GIB:.1f}" for name in sorted(peaks))


def suggest_for_episodes(cfg: RunConfig, shape: ModelShape, *, sized: SizedRun, sizing: Sizing) -> list[Suggestion]:
    """Suggest the changes that `ScorePlan.suggest` promises; `sized` is the run without any."""

    def breaks_rules(step: Step) -> bool:
        return any(broken_score_rules(cfg.with_values(step.values, "suggestion")))

    def attempt(steps: list[Step]) -> Suggestion | None:
        changed = cfg.with_values({key: value for step in steps for key, value in step.values.items()}, "suggestion")
        if any(broken_score_rules(changed)):
            return None
        try:
            tried = sizing(changed, shape=shape)
        except ConfigError:  # the change contradicts the number of processes
            return None
        assert tried.forecast is not None
        setting = tried.forecast.setting
        hardware = Hardware(setting.device, setting.world_size)
        seen = forecast_one_row(tried.cfg, shape, hardware=hardware, strategy=setting.strategy)
        return Suggestion(", ".join(step.change for step in steps), seen.peak_bytes, seen.verdict == "fits")

    assert sized.forecast is not None
    steps, shards = [], list[Step]()
    for step in list_steps(sized.cfg, Hardware(sized.forecast.setting.device, sized.world_size)):
        # Where the layout that is written forbids the step, it is left to the kit.
        free = {key: "auto" for key in (PLACEMENT, STRATEGY) if cfg.get_value(key) in ("sharded", "fsdp")}
        free = free if breaks_rules(step) else {}
        words = [step.change, *(f"{key}=auto" for key in free)]
        steps.append(Step(", ".join(words), {**step.values, **free}) if free else step)
    is_open = cfg.score.placement == "auto" and cfg.cluster.strategy == "auto"
    if not is_open and sized.cfg.score.placement != "sharded":
        # Models in shards, where the config as it is written leaves them out.
        values = {STRATEGY: "auto", "train.precision": sized.cfg.train.precision}
        if can_shard(cfg.with_values(values, "suggestion")):
            strategy = {STRATEGY: "fsdp"} if cfg.cluster.strategy == "ddp" else {}
            shards = [step_to({PLACEMENT: "sharded", **strategy})]
    # Changes that cost time or nothing, and that go with models in shards.
    exact = [s for s in steps if s.change.startswith(("train.gradient_checkpointing", "train.optim=adamw_torch_fused"))]
    others = [step for step in steps if step not in exact]
    combinations = [*added_up([*exact, *shards]), *added_up(steps)]
    return first_that_fit([*exact, *shards, *others], attempt, combined=combinations)


class ScorePlan(TaskSizing, TaskReport):
    """Two models, or one with two adapters, sample episodes and learn from them."""

    unit = "episodes"
    splits_by_strategy = False

    def memory(self, cfg: RunConfig, *, hardware: Hardware) -> Episodes:
        return read_episodes(cfg, gpus=hardware.gpus, processes=hardware.world_size)

    def choose_placement(self, cfg: RunConfig, shape: ModelShape | None, *, hardware: Hardware) -> Decisions:
        """Decide placement and the reference's device, where they are open.

        Raises:
            ConfigError: devices contradict the placement or the number of processes.
            MachineError: the machine lacks a GPU that is named.
        """
        layouts = candidates(cfg, hardware)
        placement: Any = layouts[0].placement
        resolve_layout(cfg, placement=placement, gpus=hardware.gpus, processes=hardware.world_size)
        if shape is None:
            why = "the model's shape is not known here, so nothing says that it must be separated"
            return {PLACEMENT: Decision(placement, why)}
        seen, filled = dict[Candidate, Forecast](), dict[Candidate, str]()
        for layout in layouts:
            found = seen[layout] = forecast_layout(cfg, shape, hardware=hardware, candidate=layout)
            filled[layout] = f"{format_bytes(found.peak_bytes)} of {format_bytes(found.budget_bytes)}"
        fitting = [layout for layout in layouts if seen[layout].verdict != "does_not_fit"]
        if fitting:
            chosen = fitting[0]
            skipped = [f"{layout.name} takes {filled[layout]}" for layout in layouts[: layouts.index(chosen)]]
            why = "; ".join([f"{filled[chosen]} on the fullest device", *skipped])
        else:
            chosen = min(layouts, key=lambda layout: seen[layout].peak_bytes)
            why = f"no layout fits; this one comes nearest, with {filled[chosen]}"
        return {key: Decision(value, why) for key, value in chosen.values.items()}

    def fixed_strategy(self, cfg: RunConfig) -> Decision | None:
        if cfg.score.placement == "sharded":
            return Decision("fsdp", "score.placement sharded splits both models by torch itself")
        return Decision("ddp", f"score.placement {cfg.score.placement} has both models whole")

    def fixed_head(self, cfg: RunConfig) -> Decision | None:
        return Decision("chunked", "log-probabilities of actions are taken in chunks of tokens")

    def decide_sampling(self, cfg: RunConfig, shape: ModelShape | None, *, hardware: Hardware) -> Decisions:
        forecast_rows = forecast_sampling(cfg, shape, hardware=hardware) if shape is not None else None
        share = max(1, cfg.train.effective_batch_size * cfg.score.steps_per_generation // hardware.world_size)
        return {"score.generation_rows": decide_rows_at_once(share, forecast_rows)}

    def rows_sampled(self, cfg: RunConfig) -> int:
        return cfg.score.generation_rows or 0

    def lengths(self, cfg: RunConfig) -> Iterator[tuple[str, int, int]]:
        yield "model.max_seq_len", cfg.row_tokens, cfg.score.max_new_tokens + cfg.score.max_hint_tokens

    def steps(self, cfg: RunConfig) -> tuple[int, str] | None:
        steps, per_rollout = cfg.score.stage1_steps + cfg.score.stage2_steps, cfg.score.steps_per_rollout
        episodes = cfg.train.effective_batch_size * cfg.score.steps_per_generation
        rollouts = f"; {math.ceil(steps / per_rollout)} drawings of {episodes} episodes" if per_rollout > 1 else ""
        return steps, f"score.stage1_steps and score.stage2_steps{rollouts}"

    def size(self, cfg: RunConfig, sizing: Sizing, *, shape: ModelShape, world_size: int, is_free: bool) -> SizedRun:
        """Take one process where nobody named a number and the parts need several GPUs."""
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
        """Suggest changes with which one row a micro-batch fits; where no single one does, all of them added up.

        `cfg` is as the user wrote it, with its `auto`.
        """
        assert sized.forecast is not None
        shape = sized.forecast.setting.shape
        return suggest_for_episodes(cfg, shape, sized=sizing(cfg, shape=shape), sizing=sizing)

    def workload(self, cfg: RunConfig, seen: Forecast, *, lengths: RowLengths | None = None) -> Workload:
        work = estimate_workload(cfg, seen.setting, lengths=lengths)
        return replace(work, tokens=None)  # an episode is three texts, each as long as the models make it

    def compare(self, cfg: RunConfig, shape: ModelShape, *, hardware: Hardware) -> tuple[list[Any], Iterator[str]]:
        """Compare all layouts; recommend the first that fits of the tuning in the config, or of a cheaper one."""
        modes, gpus, rows = ("full", "lora", "qlora"), max(1, hardware.gpus), []
        for mode in modes:
            tuned = cfg.with_values({"tuning.mode": mode, PLACEMENT: "auto", REF: "auto", STRATEGY: "auto"}, "compare")
            # Processes that each hold everything, then one process with several devices.
            for processes in sorted({gpus, 1}, reverse=True):
                used = replace(hardware, world_size=processes)
                rows += [
                    LayoutRow(mode, layout, forecast_layout(tuned, shape, hardware=used, candidate=layout))
                    for layout in candidates(tuned, used)
                    if processes == gpus or layout.placement != "shared"
                ]
        wanted = modes[modes.index(cfg.tuning.mode) :]
        fitting = [row for row in rows if row.mode in wanted and row.forecast.verdict == "fits"]
        best = min(fitting, key=lambda row: wanted.index(row.mode), default=None)
        rows = [replace(row, is_recommended=row is best) for row in rows]
        head = "| tuning | layout | processes | GiB on each device | host | budget | verdict |"
        return rows, iter([head, "| --- " * 7 + "|", *(row.as_line() for row in rows)])

    def describe_tokens(self, cfg: RunConfig, planned: int) -> str:
        return f"prompts and answers of {planned} tokens together"

    def describe_sampling(self, seen: Forecast, plan: dict[str, Any]) -> Iterator[str]:
        return describe_layout(seen)


PLAN = ScorePlan()
