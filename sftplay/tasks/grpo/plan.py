"""Task grpo in the plan: what samples completions, how many at a time, and what a sized run says of them.

The rules of groups are those of TRL's GRPOConfig (trl 1.16, `__post_init__`): a drawing, which is steps_per_generation
optimizer steps long, holds whole groups of num_generations completions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError, MachineError
from sftplay.machine.doctor.install import is_within
from sftplay.machine.libraries import VLLM_INSTALL, vllm_problem
from sftplay.machine.probe import Machine
from sftplay.plan.memory.forecast import Forecast, Hardware
from sftplay.plan.memory.memory_setup import MemorySetup, read_memory_setup
from sftplay.plan.memory.sharding import Strategy
from sftplay.plan.report.tables import PHASES, label
from sftplay.plan.report.task_report import TaskReport
from sftplay.plan.shape.model_shape import ModelShape
from sftplay.plan.sizing.decisions import Decision, Decisions
from sftplay.plan.sizing.placement import planned_strategy
from sftplay.plan.sizing.task_sizing import TaskSizing
from sftplay.tasks.grpo.memory import CACHE, Rollout, cache_bytes, forecast_sampling, read_rollout
from sftplay.tasks.grpo.spec import EFFECTIVE, completions_of_drawing
from sftplay.units import GIB, format_bytes

ENOUGH = 4
"""Completions of a group from which on their rewards differ in more than two ways: with 2, an advantage is 0 or the
same number up and down."""

FP32_HEAD = "cast_lm_head_to_fp32"
"""Field of TRL's GRPOConfig: the head computes in fp32, which keeps large scores from overflowing fp16."""

OLDEST_TRL = "1.16"
"""The first release that takes log-probabilities in the tiles that `tasks.grpo.rollouts` narrows."""


def refuse_generation(cfg: RunConfig, machine: Machine, *, world_size: int) -> None:
    """Check that what draws completions can run here.

    Raises:
        MachineError: it is not installed or too old, or the GPUs are too old.
        ConfigError: vLLM cannot split the model over the processes.
    """
    kind, key = cfg.grpo.generation, "grpo.generation"
    _refuse_old_trl(cfg, machine)
    if kind == "transformers":
        return
    where = f"{cfg.origins.get(key, 'grpo')} {key}"
    fix = f"write {key}: transformers"
    old = [gpu for gpu in machine.gpus if not gpu.has_bf16]
    if old:
        capability = ".".join(map(str, old[0].capability))
        why = f"{old[0].name} has compute capability {capability}, and below 8.0 only transformers is offered: "
        why += "vLLM's wheels leave out the oldest of these cards" if kind != "continuous" else "nobody has tried it"
        raise MachineError(why, where=where, fix=fix)
    if kind.startswith("vllm") and not machine.gpus and kind == "vllm_colocate":
        raise MachineError("vLLM shares the training GPUs, and there is none", where=where, fix=fix)
    if kind.startswith("vllm") and find_spec("vllm") is None:
        raise MachineError("the package vllm is not installed", where=where, fix=f"{VLLM_INSTALL}, or {fix}")
    if kind.startswith("vllm") and (problem := vllm_problem()):
        raise MachineError(problem, where=where, fix=f"{VLLM_INSTALL}, or {fix}")
    split = cfg.grpo.vllm.tensor_parallel
    if kind == "vllm_colocate" and world_size % split:
        key = "grpo.vllm.tensor_parallel"
        raise ConfigError(
            f"{split} does not divide {world_size} process(es)",
            where=f"{cfg.origins.get(key, 'grpo')} {key}",
            fix=f"write {math.gcd(split, world_size)}, or use another number of processes",
        )


def _refuse_old_trl(cfg: RunConfig, machine: Machine) -> None:
    release = machine.libraries.get("trl")
    if release is not None and not is_within(release, f">={OLDEST_TRL}"):
        raise MachineError(
            f"task_mode grpo needs trl {OLDEST_TRL} or newer, and trl {release} is installed",
            where=f"{cfg.origins.get('task_mode', 'default')} task_mode",
            fix=f"pip install 'trl>={OLDEST_TRL}'; unsloth wants an older one, so use an environment without it",
        )


def refuse_parts(cfg: RunConfig, *, strategy: Strategy, world_size: int) -> None:
    """Check that a drawing goes together with what each process holds and draws; `strategy` is decided.

    Raises:
        ConfigError: it does not.
    """
    grpo, is_sharded = cfg.grpo, strategy in ("zero3", "fsdp")
    own = completions_of_drawing(cfg) // world_size
    told = {
        "grpo.generation": (
            is_sharded and grpo.generation.startswith("vllm") and cfg.tuning.mode != "full",
            f"{grpo.generation} cannot be sent an adapter whose base is in parts ({strategy})",
            "write cluster.strategy: ddp, or grpo.generation: transformers",
        ),
        "grpo.skip_zero_variance": (
            is_sharded and grpo.skip_zero_variance,
            f"processes that hold parts of the weights ({strategy}) must draw equally many completions",
            "remove it, or write cluster.strategy: ddp",
        ),
        "grpo.dynamic_sampling_rounds": (
            bool(grpo.dynamic_sampling_rounds) and grpo.generation == "vllm_server" and own % grpo.num_generations > 0,
            f"a vLLM server answers whole groups of {grpo.num_generations}, but a process draws {own} completions",
            f"write 0, or a {EFFECTIVE} of whole groups for each of the {world_size} processes",
        ),
    }
    for key, (is_broken, what, fix) in told.items():
        if is_broken:
            raise ConfigError(what, where=f"{cfg.origins.get(key, 'grpo')} {key}", fix=fix)


def refuse_small_engine(cfg: RunConfig, shape: ModelShape, *, execution: MemorySetup, device_bytes: int) -> None:
    """Check that vLLM's share of a GPU holds the model and one completion.

    Raises:
        MachineError: it does not.
    """
    vllm, key = cfg.grpo.vllm, "grpo.vllm.memory_share"
    if cfg.grpo.generation != "vllm_colocate":
        return
    one = cache_bytes(shape, execution, completions=1, tokens=cfg.row_tokens)
    need = (2 * shape.total_params + one) / vllm.tensor_parallel
    room = vllm.memory_share * device_bytes
    if need > room:
        raise MachineError(
            f"{vllm.memory_share:g} of the GPU is {format_bytes(int(room))}, but vLLM needs {format_bytes(int(need))} "
            "for the model in 16 bits and one completion",
            where=f"{cfg.origins.get(key, 'grpo')} {key}",
            fix=f"write {math.ceil(100 * need / device_bytes) / 100:g} or more, or grpo.generation: transformers",
        )


def refuse_mixed_cache(cfg: RunConfig) -> None:
    """Check that continuous batching gets keys of the dtype that its cache has (transformers 5.23).

    Raises:
        ConfigError: all weights train in fp32, and so is the cache, but keys are computed in 16 bits.
    """
    key, precision = "grpo.generation", cfg.train.precision
    if cfg.grpo.generation == "continuous" and cfg.tuning.mode == "full" and precision != "fp32":
        raise ConfigError(
            f"continuous has a cache in the fp32 of the weights, and train.precision {precision} fills it",
            where=f"{cfg.origins.get(key, 'grpo')} {key}",
            fix=f"write {key}: transformers, or tuning.mode: lora",
        )


def refuse_shared_head(cfg: RunConfig, shape: ModelShape) -> None:
    """Check that the head can be fp32 alone.

    Raises:
        ConfigError: it shares its weights with the embedding, where TRL refuses it once the model is loaded.
    """
    key = f"grpo.extra.{FP32_HEAD}"
    if cfg.grpo.extra.get(FP32_HEAD) and shape.tied:
        raise ConfigError(
            f"the head of {shape.name} is its embedding, so it cannot be fp32 alone",
            where=f"{cfg.origins.get(key, 'grpo')} {key}",
            fix="remove it; tuning.mode: full holds all weights in fp32",
        )


def decide_rows_at_once(share: int, look: Callable[[int], Forecast] | None) -> Decision:
    """Decide how many of its `share` of completions a process samples at a time: all, or parts that fit the device.

    `look` forecasts the phase of sampling alone for so many; None where memory is not planned.
    """
    if look is None or look(share).verdict == "fits":
        return Decision(share, f"all {share} completions of a process at once")
    low, high = 1, share
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if look(middle).verdict == "fits" else (low, middle)
    parts = -(-share // low)
    rows = -(-share // parts)
    seen = look(rows)
    filled = f"{format_bytes(seen.peak_bytes)} of {format_bytes(seen.budget_bytes)}"
    return Decision(rows, f"{share} completions of a process in {parts} parts; one takes {filled} with its margin")


def notes_on_drawing(cfg: RunConfig, shape: ModelShape | None) -> tuple[str, ...]:
    """What the user should know of a sized run that learns from rewards."""
    grpo = cfg.grpo
    notes = []
    if grpo.importance_sampling_level == "sequence" and grpo.loss_type in ("bnpo", "dr_grpo", "dapo", "cispo"):
        notes.append(
            f"grpo.importance_sampling_level sequence with loss_type {grpo.loss_type} makes long completions count "
            "more; GSPO is loss_type grpo"
        )
    if grpo.num_generations < ENOUGH:
        notes.append(
            f"grpo.num_generations {grpo.num_generations}: few completions say little about their prompt; 8 is usual"
        )
    if cfg.train.precision == "fp16" and shape is not None and not shape.tied and FP32_HEAD not in grpo.extra:
        notes.append(f"train.precision fp16: where scores overflow it, write grpo.extra: {{{FP32_HEAD}: true}}")
    if grpo.placebo_reward is not None:
        notes.append(f"grpo.placebo_reward {grpo.placebo_reward}: the model is not paid what its completions are worth")
    return tuple(notes)


def describe_sampling(seen: Forecast, plan: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines about groups, and what each phase of a step takes."""
    rollout = seen.setting.task
    assert isinstance(rollout, Rollout)
    batch, group = plan["generation_batch_size"], plan["num_generations"]
    prompts = f"{batch // group} prompt{'s' if batch > group else ''}"
    yield f"groups      {prompts} x {group} completions = {batch} a rollout batch, by {rollout.engine}"
    yield f"            {seen.sampled} at a time on each process"
    yield f"            prompts of {rollout.prompt_tokens} tokens, completions of {rollout.completion_tokens}, at most"
    shape, execution = seen.setting.shape, seen.setting.execution
    full = cache_bytes(shape, execution, completions=seen.sampled, tokens=rollout.tokens)
    for name, parts in seen.footprint.phases.items():
        cache = parts.get(CACHE, 0.0)
        held = f", {cache / GIB:.3f} GiB of it keys and values" if cache else ""
        if 0 < cache < full:  # the prompts take more at the beginning than everything does at the end
            held += f", {full / GIB:.3f} GiB at full length"
        yield f"  {label(seen, name, labels=PHASES):48} {sum(parts.values()) / GIB:9.3f} GiB{held}"


class GrpoPlan(TaskSizing, TaskReport):
    """Completions are sampled and scored before the model learns from them."""

    unit = "completions"

    def memory(self, cfg: RunConfig, *, hardware: Hardware) -> Rollout:
        return read_rollout(cfg, device_bytes=hardware.device.total_bytes)

    def refuse_machine(self, cfg: RunConfig, machine: Machine, *, world_size: int) -> None:
        refuse_generation(cfg, machine, world_size=world_size)

    def fixed_head(self, cfg: RunConfig) -> Decision | None:
        return Decision("chunked", "TRL takes the probabilities of completions in tiles of 4096 tokens x 32768 words")

    def decide_sampling(self, cfg: RunConfig, shape: ModelShape | None, *, hardware: Hardware) -> Decisions:
        refuse_mixed_cache(cfg)
        refuse_parts(cfg, strategy=planned_strategy(cfg, hardware.world_size), world_size=hardware.world_size)
        if shape is not None:
            refuse_shared_head(cfg, shape)
            refuse_small_engine(cfg, shape, execution=read_memory_setup(cfg), device_bytes=hardware.device.total_bytes)
        share = max(1, completions_of_drawing(cfg) // hardware.world_size)
        if cfg.grpo.generation.startswith("vllm"):
            why = f"{cfg.grpo.generation} takes all of a drawing and queues them itself"
            return {"grpo.generation_rows": Decision(share, why)}
        look = forecast_sampling(cfg, shape, hardware=hardware) if shape is not None else None
        return {"grpo.generation_rows": decide_rows_at_once(share, look)}

    def rows_sampled(self, cfg: RunConfig) -> int:
        return cfg.grpo.generation_rows or 0

    def notes(self, cfg: RunConfig, shape: ModelShape | None) -> tuple[str, ...]:
        return notes_on_drawing(cfg, shape)

    def plan_fields(self, cfg: RunConfig) -> dict[str, int]:
        grpo = cfg.grpo
        return {
            "num_generations": grpo.num_generations,
            "generation_batch_size": completions_of_drawing(cfg),
            "steps_per_generation": grpo.steps_per_generation * int(cfg.train.grad_accum),
            "generation_rows": int(grpo.generation_rows or 0),
        }

    def lengths(self, cfg: RunConfig) -> Iterator[tuple[str, int, int]]:
        yield "grpo.max_completion_length", cfg.grpo.max_completion_length, 0
        yield "grpo.max_prompt_length", cfg.prompt_tokens, 0

    def rows_per_record(self, cfg: RunConfig) -> int:
        return cfg.grpo.num_generations

    def describe_length(self, cfg: RunConfig) -> str:
        return "every completion at full length"

    def describe_tokens(self, cfg: RunConfig, planned: int) -> str:
        return f"prompts and completions of {planned} tokens together"

    def describe_sampling(self, seen: Forecast, plan: dict[str, Any]) -> Iterator[str]:
        return describe_sampling(seen, plan)


PLAN = GrpoPlan()
