"""Task score in the plan: memory of its phases, where its models lie, layouts side by side, and its words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError
from sftplay.plan.activations import reference_scores
from sftplay.plan.advice import Step, Suggestion, added_up, first_that_fit, list_steps, step_to
from sftplay.plan.devices import OWN, name_devices
from sftplay.plan.forecast import (
    ALONE,
    SHARDING,
    Communication,
    DeviceShare,
    Footprint,
    Forecast,
    Hardware,
    RowLengths,
    Setting,
    Size,
    StaticMemory,
    estimate,
    standing_bytes,
)
from sftplay.plan.memory_setup import MemorySetup
from sftplay.plan.report import Sizing, TaskReport, Workload, estimate_workload, label
from sftplay.plan.shape import ModelShape
from sftplay.plan.sizing import STRATEGY, Decision, Decisions, SizedRun, TaskSizing, forecast_one_row, planned_strategy
from sftplay.tasks.grpo.plan import (
    DRAW,
    REFERENCE,
    SAMPLING_LABELS,
    Rollout,
    decide_rows_at_once,
    forecast_sampling,
    forward_layer,
    newest_token,
)
from sftplay.tasks.score.section import SEPARATE_WIDTH
from sftplay.tasks.score.spec import DEVICES, PLACEMENT, SPEC, Layout, broken_shard_rules, resolve_layout
from sftplay.units import GIB, format_bytes

START, GUIDE, COMPARE, CRITIC, VALUE = "start", "guide's ", "reference's answer", "critic", "value"

FP32, ADAM_COPIES = 4, 4
"""A weight that trains in fp32, its gradient and two moments."""


@dataclass(frozen=True, kw_only=True)
class Episodes:
    """The episodes that are sampled, what learns, and where it lies.

    `tokens` are those of the longest prompt and action together. A width is 0 where there is no such network, and where
    V is a head on the guide, which is small.
    """

    layout: Layout
    tokens: int
    answer_tokens: int
    hint_tokens: int
    has_guide: bool = True
    guide_learns: bool = True
    critic_width: int = 0
    value_width: int = 0

    labels: ClassVar[Mapping[str, str]] = {
        CRITIC: "critic and its slow copy",
        VALUE: "value network",
        START: "at the start, while the solver is whole",
        COMPARE: "while the reference scores actions",
        f"{GUIDE}head": "in the guide's loss",
        f"{GUIDE}layer": "in a layer's backward pass of the guide",
        **SAMPLING_LABELS,
    }

    @property
    def learners(self) -> int:
        """Models that train."""
        return 1 + self.guide_learns

    def forecast(self, setting: Setting, size: Size, *, sampled: int, share: DeviceShare) -> Forecast:
        """Forecast a step; the footprint is that of the fullest GPU, or of the process's own device."""
        found = estimate_episodes(
            setting.shape, setting.execution, episodes=self, rows=size.rows, sampled=sampled,
            world_size=setting.world_size,
        )  # fmt: skip
        on_host = found.pop("cpu").peak_bytes if "cpu" in found else 0
        fullest = max(found, key=lambda name: found[name].peak_bytes)
        return Forecast(setting, size, found[fullest], on_host, sampled, found if len(found) > 1 else {})


def read_episodes(cfg: RunConfig, *, gpus: int, processes: int) -> Episodes:
    """Read the episodes of a config in which the placement is decided."""
    score = cfg.score
    placement: Any = "shared" if score.placement == "auto" else score.placement
    return Episodes(
        layout=resolve_layout(cfg, placement=placement, gpus=gpus, processes=processes),
        tokens=cfg.model.max_seq_len,
        answer_tokens=score.max_new_tokens,
        hint_tokens=score.max_hint_tokens,
        has_guide=score.guidance in ("model", "model_trained"),
        guide_learns=score.guidance == "model_trained",
        critic_width=score.critic.width if score.advantage == "critic" else 0,
        value_width=SEPARATE_WIDTH if score.value == "separate" and score.has_value else 0,
    )


def estimate_episodes(
    shape: ModelShape, execution: MemorySetup, *, episodes: Episodes, rows: int, sampled: int, world_size: int = 1
) -> dict[str, Footprint]:
    """Return device -> bytes of every phase of one step in the steady state; of models in shards also of the start.

    `rows` is the micro-batch, `sampled` the answers that a process samples at a time.
    """
    found, held_by_device = {}, find_parts(episodes, execution)
    for device in sorted({*held_by_device, OWN}):
        held = frozenset(held_by_device.get(device, ()))
        on = DeviceMemory(shape, execution, episodes=episodes, held=held, world_size=world_size)
        found[device] = Footprint({name: parts for name, parts in on.phases(rows, sampled).items() if parts})
    if episodes.layout.is_split:
        # Guide and reference, as far as there are any, wait on the host until they are split.
        waiting = standing_bytes(shape, execution).weights * (episodes.has_guide + execution.trains_all)
        found["cpu"] = Footprint({START: {"weights": waiting}})
    return found


def find_parts(episodes: Episodes, execution: MemorySetup) -> dict[str, list[str]]:
    """Return device -> the parts that lie there, as far as the run has them."""
    unused = set() if episodes.has_guide else {"guide", "value"}
    unused |= set() if episodes.critic_width else {"critic", "target_critic"}
    unused |= set() if execution.trains_all else {"ref"}
    found: dict[str, list[str]] = {}
    for part, device in episodes.layout.devices().items():
        if part not in unused:
            found.setdefault(device, []).append(part)
    return found


class DeviceMemory:
    """The memory of one device of a run; `held` are the parts that it holds."""

    def __init__(
        self, shape: ModelShape, execution: MemorySetup, *, episodes: Episodes, held: frozenset[str], world_size: int
    ) -> None:
        self.shape, self.execution, self.episodes, self.held = shape, execution, episodes, held
        self.computing, self.gathered, self.head, is_split = execution, ALONE, 0.0, episodes.layout.is_split
        self.whole = standing_bytes(shape, execution)
        one = StaticMemory(**{name: size / (world_size if is_split else 1) for name, size in vars(self.whole).items()})
        if is_split:
            # A pass gathers the head, a layer, and the next one, in the precision that computes: there is no rounded
            # copy of shards. With tied weights the head is the embedding.
            width = execution.compute_bytes
            self.computing = replace(execution, weight_bytes=width, stream_bytes=width)
            self.head = float((shape.other_params - (0 if shape.tied else shape.vocab * shape.hidden)) * width)
            layer = (shape.total_params - shape.other_params) / shape.layers * width
            self.gathered = Communication(gathered=self.head + layer, ahead=layer)
        is_separate = episodes.has_guide and (episodes.layout.separates or execution.trains_all)
        solver, guide = "solver" in held, "guide" in held
        learners = solver + (guide and episodes.guide_learns)
        self.standing = StaticMemory(
            weights=(solver + (guide and is_separate)) * one.weights,
            adapters=(solver + guide) * one.adapters,
            gradients=learners * one.gradients,
            optimizer=learners * one.optimizer,
        )
        # DDP's buckets for the model that the Trainer holds; a separate guide is no part of it.
        sent = self.standing.gradients / (episodes.learners if is_separate else 1)
        # Critic and value: nearly all is the table of tokens, with gradient and moments. The slow copy has neither.
        row, copies = shape.vocab * FP32, ADAM_COPIES * ("critic" in held) + ("target_critic" in held)
        self.others = {
            REFERENCE: one.weights if "ref" in held else 0.0,
            CRITIC: float(row * episodes.critic_width * copies),
            VALUE: float(row * episodes.value_width * ADAM_COPIES * ("value" in held)),
            SHARDING: 0.0 if world_size == 1 or is_split else sent,
        }
        self.resident = {
            "weights": self.standing.weights,
            "adapters": self.standing.adapters,
            "optimizer": self.standing.optimizer,
            **self.others,
            "workspace": float(execution.workspace_bytes),
        }

    def phases(self, rows: int, sampled: int) -> dict[str, dict[str, float]]:
        """Return phase -> component -> bytes."""
        episodes, held, sampling = self.episodes, self.held, []
        # Of a score of the newest token: the model's in fp32, transformers' copy, that over the temperature, what was
        # left of the token before, and two rows of probabilities in fp64 (`generate.generate.SampleByRow`).
        score_bytes = 32
        for role, longest in (("solver", episodes.answer_tokens), ("guide", episodes.hint_tokens)):
            if role in held:
                prompt = episodes.tokens - longest
                rollout = Rollout(completions=sampled, prompt_tokens=prompt, completion_tokens=longest, micro_batch=1)
                sampling.append(newest_token(self.shape, self.computing, rollout=rollout, score_bytes=score_bytes))
        # Of the role on this device that takes more.
        most = max(sampling, key=lambda parts: sum(parts.values()), default={})
        sharding = self.others[SHARDING] + self.gathered.gathered + self.gathered.ahead
        found = {DRAW: {**self.resident, SHARDING: sharding, **most}}
        if episodes.layout.is_split:
            found[START] = {"weights": self.whole.weights}
        if "guide" in held and episodes.guide_learns:
            learned = self._learning(rows, episodes.hint_tokens)
            found |= {f"{GUIDE}{name}": learned[name] for name in ("head", "layer")} | {"step": learned["step"]}
        if "solver" in held:
            found |= self._learning(rows, episodes.answer_tokens)
        elif "ref" in held:
            # A forward pass of the reference for a model on another device.
            tokens, actions = rows * episodes.tokens, rows * episodes.answer_tokens
            layer = forward_layer(self.shape, self.execution, rows=rows, seq=episodes.tokens)
            head = reference_scores(self.shape, self.execution, tokens=tokens, labelled=actions)
            at_work = {"layer": layer} if layer > head else {"head": head}
            found[COMPARE] = {**self.resident, "gradients": self.standing.gradients, **at_work}
        if not found.get("step"):
            found["step"] = self.resident
        return found

    def _learning(self, rows: int, longest: int) -> dict[str, dict[str, float]]:
        """Return a micro-batch of one role; both models' gradients are there, since turn 2 follows turn 1."""
        size = Size(rows=rows, seq=self.episodes.tokens, labelled=rows * longest, accumulates=True)
        learned = estimate(
            self.shape, self.computing, size=size, standing=self.standing, communication=self.gathered
        ).phases
        if not self.episodes.layout.is_split:
            return {name: {**parts, **self.others} for name, parts in learned.items()}
        others = {**self.others, REFERENCE: self.others[REFERENCE] + self.head}
        del others[SHARDING]
        found = {name: {**parts, **others} for name, parts in learned.items()}
        # Whole gradients of the layer at work, and of the head, which are sent after all layers.
        found["layer"][SHARDING] += self.head + self.gathered.ahead
        return found


REF = f"{DEVICES}.ref"


@dataclass(frozen=True)
class Candidate:
    """Values of keys that make a layout."""

    placement: str
    ref_on_cpu: bool = False

    @property
    def name(self) -> str:
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


def _format_peaks(seen: Forecast) -> str:
    peaks = seen.device_peaks
    if len(peaks) == 1:
        return f"{seen.peak_bytes / GIB:.1f}"
    return ", ".join(f"{name} {peaks[name] / GIB:.1f}" for name in sorted(peaks))


class ScorePlan(TaskSizing, TaskReport):
    """Two models, or one with two adapters, sample episodes and learn from them."""

    def unit(self, cfg: RunConfig) -> str:
        return "episodes"

    splits_by_strategy = False

    def memory(self, cfg: RunConfig, *, hardware: Hardware) -> Episodes:
        return read_episodes(cfg, gpus=hardware.gpus, processes=hardware.world_size)

    def choose_placement(self, cfg: RunConfig, shape: ModelShape | None, *, hardware: Hardware) -> Decisions:
        """Decide placement and the reference's device, where they are open.

        Raise ConfigError where devices contradict the placement or the number of processes, MachineError where the
        machine lacks a GPU that is named.
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

    def uses_several_gpus(self, cfg: RunConfig) -> bool:
        is_named = any(str(device).startswith("cuda:") for device in dict(cfg.score.devices).values())
        return cfg.score.placement not in ("shared", "sharded") or is_named

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
        whole = sizing(cfg, shape=shape)
        assert whole.forecast is not None

        def attempt(steps: list[Step]) -> Suggestion | None:
            values = {key: value for step in steps for key, value in step.values.items()}
            changed = cfg.with_values(values, "suggestion")
            if any(SPEC.broken_rules(changed)):
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

        steps, shards = [], list[Step]()
        for step in list_steps(whole.cfg, Hardware(whole.forecast.setting.device, whole.world_size)):
            # Where the layout that is written forbids the step, it is left to the kit.
            free = {key: "auto" for key in (PLACEMENT, STRATEGY) if cfg.get_value(key) in ("sharded", "fsdp")}
            free = free if any(SPEC.broken_rules(cfg.with_values(step.values, "suggestion"))) else {}
            words = [step.change, *(f"{key}=auto" for key in free)]
            steps.append(Step(", ".join(words), {**step.values, **free}) if free else step)
        is_open = cfg.score.placement == "auto" and cfg.cluster.strategy == "auto"
        if not is_open and whole.cfg.score.placement != "sharded":
            # Models in shards, where the config as it is written leaves them out.
            values = {STRATEGY: "auto", "train.precision": whole.cfg.train.precision}
            if can_shard(cfg.with_values(values, "suggestion")):
                strategy = {STRATEGY: "fsdp"} if cfg.cluster.strategy == "ddp" else {}
                shards = [step_to({PLACEMENT: "sharded", **strategy})]
        # Changes that cost time or nothing, and that go with models in shards.
        free_changes = ("train.gradient_checkpointing", "train.optim=adamw_torch_fused")
        exact = [step for step in steps if step.change.startswith(free_changes)]
        others = [step for step in steps if step not in exact]
        combinations = [*added_up([*exact, *shards]), *added_up(steps)]
        return first_that_fit([*exact, *shards, *others], attempt, combined=combinations)

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


PLAN = ScorePlan()
