"""Task grpo in the plan: what samples completions, how many at a time, and what a sized run says of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError, MachineError
from sftplay.machine.doctor.install import is_within
from sftplay.machine.libraries import VLLM_INSTALL, vllm_problem
from sftplay.machine.probe import Machine
from sftplay.plan.memory.forecast import Forecast, Hardware
from sftplay.plan.memory.memory_setup import read_memory_setup
from sftplay.plan.report.tables import PHASES, label
from sftplay.plan.report.task_report import TaskReport
from sftplay.plan.shape.model_shape import ModelShape
from sftplay.plan.sizing.decisions import Decision, Decisions
from sftplay.plan.sizing.placement import planned_strategy
from sftplay.plan.sizing.task_sizing import TaskSizing
from sftplay.tasks.grpo.memory import CACHE, Rollout, cache_bytes, forecast_sampling
from sftplay.tasks.grpo.spec import EFFECTIVE, count_batch_completions
from sftplay.units import GIB, format_bytes

ENOUGH = 4
"""Completions of a group from which on their rewards differ in more than two ways: with 2, an advantage is 0 or the
same number up and down."""

FP32_HEAD = "cast_lm_head_to_fp32"
"""Field of TRL's GRPOConfig: the head computes in fp32, which keeps large scores from overflowing fp16."""

OLDEST_TRL = "1.16"  # the first release that takes log-probabilities in the tiles that `train.upstream` narrows


def _find_key(cfg: RunConfig, key: str) -> str:
    return f"{cfg.origins.get(key, 'grpo')} {key}"


def refuse_parts(cfg: RunConfig, shape: ModelShape | None, *, hardware: Hardware) -> None:
    """Check that a rollout batch goes together with what each process holds and samples.

    Raises:
        ConfigError: it does not.
        MachineError: vLLM's share of a GPU does not hold the model and one completion.
    """
    grpo, kind, precision = cfg.grpo, cfg.grpo.generation, cfg.train.precision
    world_size, strategy = hardware.world_size, planned_strategy(cfg, hardware.world_size)
    is_sharded, head = strategy in ("zero3", "fsdp"), f"grpo.extra.{FP32_HEAD}"
    local = count_batch_completions(cfg) // world_size
    table = (
        (  # keys are computed in 16 bits, and transformers 5.23 does not convert them
            "grpo.generation", kind == "continuous" and cfg.tuning.mode == "full" and precision != "fp32",
            f"continuous has a cache in the fp32 of the weights, and train.precision {precision} fills it",
            "write grpo.generation: transformers, or tuning.mode: lora",
        ),
        (
            "grpo.generation", is_sharded and kind.startswith("vllm") and cfg.tuning.mode != "full",
            f"{kind} cannot be sent an adapter whose base is in parts ({strategy})",
            "write cluster.strategy: ddp, or grpo.generation: transformers",
        ),
        (
            "grpo.skip_zero_variance", is_sharded and grpo.skip_zero_variance,
            f"processes that hold parts of the weights ({strategy}) must sample equally many completions",
            "remove it, or write cluster.strategy: ddp",
        ),
        (
            "grpo.dynamic_sampling_rounds",
            grpo.dynamic_sampling_rounds and kind == "vllm_server" and local % grpo.num_generations,
            f"a vLLM server answers whole groups of {grpo.num_generations}, but a process samples {local} completions",
            f"write 0, or a {EFFECTIVE} of whole groups for each of the {world_size} processes",
        ),
        (  # TRL refuses it once the model is loaded
            head, grpo.extra.get(FP32_HEAD) and shape is not None and shape.tied,
            f"the head of {shape.name if shape else ''} is its embedding, so it cannot be fp32 alone",
            "remove it; tuning.mode: full holds all weights in fp32",
        ),
    )  # fmt: skip
    for key, is_broken, what, fix in table:
        if is_broken:
            raise ConfigError(what, where=_find_key(cfg, key), fix=fix)
    if shape is None or kind != "vllm_colocate":
        return
    device_bytes, share = hardware.device.total_bytes, grpo.vllm.memory_share
    one = cache_bytes(shape, read_memory_setup(cfg), completions=1, tokens=cfg.row_tokens)
    need = (2 * shape.total_params + one) / grpo.vllm.tensor_parallel
    if need > (room := share * device_bytes):
        raise MachineError(
            f"{share:g} of the GPU is {format_bytes(int(room))}, but vLLM needs {format_bytes(int(need))} "
            "for the model in 16 bits and one completion",
            where=_find_key(cfg, "grpo.vllm.memory_share"),
            fix=f"write {math.ceil(100 * need / device_bytes) / 100:g} or more, or grpo.generation: transformers",
        )


def decide_rows_at_once(share: int, forecast: Callable[[int], Forecast] | None) -> Decision:
    """Decide how many of its `share` of completions a process samples at a time: all, or parts that fit the device.

    `forecast` is that of the phase of sampling alone for so many; None where memory is not planned.
    """
    if forecast is None or forecast(share).verdict == "fits":
        return Decision(share, f"all {share} completions of a process at once")
    low, high = 1, share
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if forecast(middle).verdict == "fits" else (low, middle)
    parts = -(-share // low)
    rows = -(-share // parts)
    seen = forecast(rows)
    filled = f"{format_bytes(seen.peak_bytes)} of {format_bytes(seen.budget_bytes)}"
    return Decision(rows, f"{share} completions of a process in {parts} parts; one takes {filled} with its margin")


class GrpoPlan(TaskSizing, TaskReport):
    """Completions are sampled and scored before the model learns from them."""

    unit = "completions"

    def memory(self, cfg: RunConfig, *, hardware: Hardware) -> Rollout:
        grpo = cfg.grpo
        engine_bytes = 0
        if grpo.generation == "vllm_colocate":
            engine_bytes = int(grpo.vllm.memory_share * hardware.device.total_bytes)
        # TRL scores under the older weights where completions outlive a step, and always next to vLLM (trl 1.16,
        # `_generate_and_score_completions`).
        outlive = grpo.steps_per_generation * grpo.num_iterations > 1
        return Rollout(
            completions=1,
            prompt_tokens=cfg.prompt_tokens,
            completion_tokens=grpo.max_completion_length,
            micro_batch=1,
            has_reference=grpo.beta > 0,
            continues_adapter=cfg.model.adapter is not None,
            scores_first=outlive or grpo.beta > 0 or grpo.generation.startswith("vllm"),
            limits_probability=grpo.top_p < 1,
            engine=grpo.generation,
            engine_bytes=engine_bytes,
            engine_sleeps=grpo.vllm.sleep,
        )

    def refuse_machine(self, cfg: RunConfig, machine: Machine, *, world_size: int) -> None:
        kind, split = cfg.grpo.generation, cfg.grpo.vllm.tensor_parallel
        release = machine.libraries.get("trl")
        if release is not None and not is_within(release, f">={OLDEST_TRL}"):
            raise MachineError(
                f"task_mode grpo needs trl {OLDEST_TRL} or newer, and trl {release} is installed",
                where=f"{cfg.origins.get('task_mode', 'default')} task_mode",
                fix=f"pip install 'trl>={OLDEST_TRL}'; unsloth wants an older one, so use an environment without it",
            )
        if kind == "transformers":
            return
        where, fix = _find_key(cfg, "grpo.generation"), "write grpo.generation: transformers"
        uses_vllm = kind != "continuous"
        if old := [gpu for gpu in machine.gpus if not gpu.has_bf16]:
            capability = ".".join(map(str, old[0].capability))
            why = f"{old[0].name} has compute capability {capability}, and below 8.0 only transformers is offered: "
            why += "vLLM's wheels leave out the oldest of these cards" if uses_vllm else "nobody has tried it"
            raise MachineError(why, where=where, fix=fix)
        if kind == "vllm_colocate" and not machine.gpus:
            raise MachineError("vLLM shares the training GPUs, and there is none", where=where, fix=fix)
        if uses_vllm:
            problem = "the package vllm is not installed" if find_spec("vllm") is None else vllm_problem()
            if problem:
                raise MachineError(problem, where=where, fix=f"{VLLM_INSTALL}, or {fix}")
        if kind == "vllm_colocate" and world_size % split:
            raise ConfigError(
                f"{split} does not divide {world_size} process(es)",
                where=_find_key(cfg, "grpo.vllm.tensor_parallel"),
                fix=f"write {math.gcd(split, world_size)}, or use another number of processes",
            )

    def fixed_head(self, cfg: RunConfig) -> Decision | None:
        return Decision("chunked", "TRL takes the probabilities of completions in tiles of 4096 tokens x 32768 words")

    def decide_sampling(self, cfg: RunConfig, shape: ModelShape | None, *, hardware: Hardware) -> Decisions:
        refuse_parts(cfg, shape, hardware=hardware)
        share = max(1, count_batch_completions(cfg) // hardware.world_size)
        if cfg.grpo.generation.startswith("vllm"):
            why = f"{cfg.grpo.generation} takes all of a rollout batch and queues them itself"
            return {"grpo.generation_rows": Decision(share, why)}
        forecast = forecast_sampling(cfg, shape, hardware=hardware) if shape is not None else None
        return {"grpo.generation_rows": decide_rows_at_once(share, forecast)}

    def rows_sampled(self, cfg: RunConfig) -> int:
        return cfg.grpo.generation_rows or 0

    def notes(self, cfg: RunConfig, shape: ModelShape | None) -> tuple[str, ...]:
        grpo, notes = cfg.grpo, list[str]()
        if grpo.importance_sampling_level == "sequence" and grpo.loss_type in ("bnpo", "dr_grpo", "dapo", "cispo"):
            why = "makes long completions count more; GSPO is loss_type grpo"
            notes.append(f"grpo.importance_sampling_level sequence with loss_type {grpo.loss_type} {why}")
        if grpo.num_generations < ENOUGH:
            why = "few completions say little about their prompt; 8 is usual"
            notes.append(f"grpo.num_generations {grpo.num_generations}: {why}")
        if cfg.train.precision == "fp16" and shape is not None and not shape.tied and FP32_HEAD not in grpo.extra:
            notes.append(f"train.precision fp16: where scores overflow it, write grpo.extra: {{{FP32_HEAD}: true}}")
        if grpo.placebo_reward is not None:
            why = "the model is not rewarded for what its completions are worth"
            notes.append(f"grpo.placebo_reward {grpo.placebo_reward}: {why}")
        return tuple(notes)

    def plan_fields(self, cfg: RunConfig) -> dict[str, int]:
        grpo = cfg.grpo
        return {
            "num_generations": grpo.num_generations,
            "generation_batch_size": count_batch_completions(cfg),
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
        """Yield lines about groups, and what each phase of a step takes."""
        rollout, setting = seen.setting.task, seen.setting
        assert isinstance(rollout, Rollout)
        batch, group = plan["generation_batch_size"], plan["num_generations"]
        prompts = f"{batch // group} prompt{'s' if batch > group else ''}"
        yield f"groups      {prompts} x {group} completions = {batch} a rollout batch, by {rollout.engine}"
        yield f"            {seen.sampled} at a time on each process"
        longest = f"prompts of {rollout.prompt_tokens} tokens, completions of {rollout.completion_tokens}, at most"
        yield f"            {longest}"
        full = cache_bytes(setting.shape, setting.execution, completions=seen.sampled, tokens=rollout.tokens)
        for name, parts in seen.footprint.phases.items():
            cache = parts.get(CACHE, 0.0)
            held = f", {cache / GIB:.3f} GiB of it keys and values" if cache else ""
            if 0 < cache < full:  # the prompts take more at the beginning than everything does at the end
                held += f", {full / GIB:.3f} GiB at full length"
            yield f"  {label(seen, name, labels=PHASES):48} {sum(parts.values()) / GIB:9.3f} GiB{held}"


PLAN = GrpoPlan()
