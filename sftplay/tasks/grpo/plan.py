"""Task grpo in the plan: the memory of its phases, what samples completions, and what a sized run says of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError, MachineError
from sftplay.machine.doctor import is_within
from sftplay.machine.probe import Machine
from sftplay.machine.releases import VLLM_INSTALL, vllm_problem
from sftplay.places import find_python
from sftplay.plan.activations import FP32, head_in_forward, inner_bytes, stream_bytes
from sftplay.plan.forecast import (
    HALF,
    MASK_BYTES,
    SHARDING,
    DeviceShare,
    Footprint,
    Forecast,
    Hardware,
    Setting,
    Size,
    Strategy,
    bias_bytes,
    estimate,
    forecast,
    planned_tokens,
    standing_bytes,
    with_loading,
)
from sftplay.plan.memory_setup import MemorySetup, read_memory_setup, trained_params
from sftplay.plan.report import PHASES, TaskReport, label
from sftplay.plan.shape import ModelShape
from sftplay.plan.sizing import Decision, Decisions, TaskSizing, build_setting, planned_strategy
from sftplay.tasks.grpo.spec import EFFECTIVE, count_batch_completions
from sftplay.units import GIB, format_bytes

DRAW, SCORE = "drawing", "scoring"

CACHE, REFERENCE, ENGINE, BLOCKS = "key-value cache", "reference", "vLLM", "attention blocks"

SAMPLING_LABELS = {
    DRAW: "while completions are sampled",
    CACHE: "keys and values of completions",
    REFERENCE: "model to compare with",
}
"""Names in `make plan` of the parts that every task with sampled completions has."""

SLEEPING_BYTES = int(1.5 * GIB)
"""Memory that vLLM keeps while it sleeps, when its weights and its cache are gone: graphs and what libraries took
(1.5e9 bytes and 1.3 GiB in reports to vLLM, issue 47654 and pull request 11743; not measured here)."""

SCORE_BYTES = 16
"""Bytes of a score of the newest token while a token is sampled: the model's, turned to fp32 by accelerate, an fp32
copy of it, its probability, and the random number it is divided by (transformers, `GenerationMixin._sample`; torch,
`multinomial`)."""

SORT_BYTES = 20
"""The same for a limit on probabilities: scores and their places in order, probabilities and their sums
(transformers, `TopPLogitsWarper`)."""

BLOCK_COST = 1.2
"""Cost of a token in a row of prompts and their completions, next to one in padded rows: its attention is computed in
blocks (`train.shared_prompt`). Measured on a CPU with 4 layers of 128: 1.15 to 1.3; larger models pay less."""

ROOM_TOKENS = 32
"""Tokens for which the kit's sampler makes room at least, when it makes room for a row (`generate.GROWTH`)."""

LIVE_STREAMS = 4
"""Residual streams that exist at a time in a forward pass without gradients: the embeddings, the input of a layer, the
output of its attention, and that after its norm."""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Number and length of the completions that a device samples and learns from at a time."""

    completions: int
    """Sampled at a time on one device. The completions of a prompt count one each."""

    prompt_tokens: int
    completion_tokens: int
    micro_batch: int  # completions in a micro-batch of the update
    has_reference: bool = False  # True where the loss compares with frozen weights (beta > 0)
    continues_adapter: bool = False
    """True where these weights are those of an adapter. A fresh one is switched off instead of copied."""

    scores_first: bool = False  # True where probabilities under older or frozen weights are computed before the update
    group: int = 1  # completions of a prompt, for which it is computed once
    drawn: int = 0  # completions that get their random numbers at once, however few are sampled at a time
    limits_probability: bool = False  # True where the likeliest tokens are sorted out (top_p below 1)
    engine: Literal["transformers", "continuous", "vllm_colocate", "vllm_server"] = "transformers"
    engine_bytes: int = 0  # the part of the card that vLLM takes (vllm_colocate)
    engine_sleeps: bool = False  # True where vLLM gives most of it back while the model is updated
    learned_group: int = 0  # completions that surely have one prompt together in a micro-batch; 0 where each has one
    labels: ClassVar[Mapping[str, str]] = {
        SCORE: "while completions are scored without gradients",
        BLOCKS: "copies of prompts",
        ENGINE: "vLLM's share",
        **SAMPLING_LABELS,
    }
    learners: ClassVar[int] = 1

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    @property
    def micro_tokens(self) -> int:
        """Tokens of a micro-batch. Where completions stay with those of their prompt, it has few prompts."""
        rows, prompts = self.micro_batch, self.micro_batch
        if self.learned_group:
            is_even = rows % self.learned_group == 0 or self.learned_group % rows == 0
            prompts = min(rows, -(-rows // self.learned_group) + (0 if is_even else 1))
        return prompts * self.prompt_tokens + rows * self.completion_tokens

    def forecast(self, setting: Setting, size: Size, *, sampled: int, share: DeviceShare) -> Forecast:
        """Forecast a step, and the phase before it in which processes split the weights."""
        footprint = estimate_rollout(
            setting.shape, setting.execution, rollout=replace(self, completions=sampled, micro_batch=size.rows),
            share=share, strategy=setting.strategy, world_size=setting.world_size, accumulates=size.accumulates,
        )  # fmt: skip
        return with_loading(Forecast(setting, size, footprint, round(share.host), sampled), share=share)


def cache_bytes(shape: ModelShape, execution: MemorySetup, *, completions: int, tokens: int) -> int:
    """Return the bytes of keys and values of all layers for every completion at its longest."""
    return completions * tokens * 2 * shape.layers * _keys_bytes(shape, execution)


def estimate_rollout(
    shape: ModelShape, execution: MemorySetup, *, rollout: Rollout, share: DeviceShare | None = None,
    strategy: Strategy = "single", world_size: int = 1, accumulates: bool = True,
) -> Footprint:  # fmt: skip
    """Estimate the bytes of every phase of one GRPO step on one device, in the steady state.

    `share` is what the device holds under `strategy`, None for all of the model.
    """
    share = share or DeviceShare(standing_bytes(shape, execution))
    size = Size(
        rows=rollout.micro_batch,
        seq=-(-rollout.micro_tokens // rollout.micro_batch),
        labelled=rollout.micro_batch * rollout.completion_tokens,
        accumulates=accumulates,
    )
    reference = 0.0
    if rollout.has_reference and (execution.trains_all or rollout.continues_adapter):
        reference = _count_reference(shape, execution, strategy=strategy, world_size=world_size)
    resident = {
        "weights": share.standing.weights,
        "adapters": share.standing.adapters,
        "optimizer": share.standing.optimizer,
        REFERENCE: reference,
        SHARDING: share.communication.buffers + share.communication.gathered,
        "workspace": float(execution.workspace_bytes),
    }
    stays = SLEEPING_BYTES if rollout.engine_sleeps else rollout.engine_bytes
    awake = float(min(stays, rollout.engine_bytes))
    update = estimate(shape, execution, size=size, standing=share.standing, communication=share.communication).phases
    sampling = {ENGINE: float(rollout.engine_bytes)}
    if not rollout.engine.startswith("vllm"):
        score = SCORE_BYTES + (SORT_BYTES if rollout.limits_probability else 0)
        if strategy.startswith(("zero3", "fsdp")) or any(kind.sliding_window or kind.mixer for kind in shape.kinds):
            rollout = replace(rollout, group=1)
        sampling = newest_token(shape, execution, rollout=rollout, score_bytes=score)
    phases = {DRAW: {**resident, **sampling}}
    if strategy.startswith("zero3") and rollout.engine != "vllm_server":
        whole = standing_bytes(shape, execution).weights * HALF / execution.weight_bytes  # gathered to generate
        phases[DRAW][SHARDING] = share.communication.buffers + max(whole, share.communication.gathered)
    if rollout.scores_first:
        # A micro-batch through the model without gradients.
        rounded = _count_rounded(shape, execution)
        labelled = size.tokens if size.labelled is None else size.labelled
        head = head_in_forward(shape, execution, tokens=size.tokens, labelled=labelled) + rounded
        layer = forward_layer(shape, execution, rows=size.rows, seq=size.seq) + rounded
        phases[SCORE] = {**resident, ENGINE: awake, **({"head": head} if head >= layer else {"layer": layer})}
    phases |= {name: {**parts, REFERENCE: reference, ENGINE: awake} for name, parts in update.items()}
    if rollout.learned_group:
        one = block_bytes(shape, execution, rollout=rollout)
        layers = 1 if execution.checkpointing else shape.layers
        for name, number in ((SCORE, 1), ("head", layers), ("layer", layers)):
            if name in phases:
                phases[name] |= {BLOCKS: number * one}
    return Footprint(phases)


def block_bytes(shape: ModelShape, execution: MemorySetup, *, rollout: Rollout) -> float:
    """Return the bytes of a layer's attention over shared prompts: padded blocks of what a row holds without padding, a
    copy of the keys and values of its prompt for each completion, and the mask of both (`train.shared_prompt`)."""
    rows, inner, query = rollout.micro_batch, inner_bytes(shape, execution), shape.heads * shape.head_dim
    keys = query if execution.repeats_kv else shape.kv_heads * shape.head_dim
    blocks = rollout.micro_tokens * 2 * (query + keys) + rows * rollout.tokens * 2 * keys
    return float(inner * blocks + rows * rollout.completion_tokens * rollout.tokens * (MASK_BYTES + inner))


def newest_token(shape: ModelShape, execution: MemorySetup, *, rollout: Rollout, score_bytes: int) -> dict[str, float]:
    """Return the larger of two moments of transformers' generation: the newest token at full length, or the prompts.

    `score_bytes` are those of a score of the newest token in all its copies.
    """
    number, prompt = rollout.completions, rollout.prompt_tokens
    # With groups: prompts are computed so many at a time, next to the rows that they are copied to. The rows have room
    # for the first completion tokens (`generate.RowCache`).
    prompts = -(-number // rollout.group)
    room = min(rollout.completion_tokens - 1, max(ROOM_TOKENS, prompt // 8)) if rollout.group > 1 else 0
    copied = prompts * prompt if rollout.group > 1 else 0
    rounded = _count_rounded(shape, execution)
    # A layer's keys are copied as they grow. One query a head reads keys that heads share (transformers, `pack_gqa`).
    grown = number * rollout.tokens * _keys_bytes(shape, execution)
    # A GPU draws the numbers of all rows of a call; those of the rows at work are then a copy (`generate.Noise`).
    noise = rollout.drawn * shape.vocab * FP32 if rollout.group > 1 and rollout.drawn > number else 0
    late = {
        CACHE: float(cache_bytes(shape, execution, completions=number, tokens=rollout.tokens)),
        "layer": float(grown),
        "head": float(number * shape.vocab * score_bytes + noise) + rounded,
    }
    early = {
        CACHE: float(cache_bytes(shape, execution, completions=1, tokens=number * (prompt + room) + copied)),
        "layer": forward_layer(shape, execution, rows=prompts, seq=prompt),
        "head": rounded,
    }
    return max(late, early, key=lambda parts: sum(parts.values()))


def forward_layer(shape: ModelShape, execution: MemorySetup, *, rows: int, seq: int) -> float:
    """Return the bytes of a layer at work without gradients: its MLP, attention or norm, and the streams next to it."""
    inner, query = inner_bytes(shape, execution), shape.heads * shape.head_dim
    keys = shape.kv_heads * shape.head_dim
    repeated = 2 * query if execution.repeats_kv and keys != query else 0
    scores = shape.heads * seq * (FP32 + inner) if execution.attention == "eager" else 0
    attention = inner * (2 * query + 2 * keys + repeated) + scores
    mlp = inner * shape.mlp * (3 if shape.gated_mlp else 2)
    norm = 3 * FP32 * shape.hidden  # fp32 copies of the stream
    token = max(mlp, attention, norm) + LIVE_STREAMS * shape.hidden * stream_bytes(shape, execution)
    mask = rows * seq**2 * (MASK_BYTES + bias_bytes(execution)) if execution.is_masked else 0
    return float(rows * seq * token + mask)


def _keys_bytes(shape: ModelShape, execution: MemorySetup) -> int:
    # Those of a token in one layer; its values are as large.
    return shape.kv_heads * shape.head_dim * inner_bytes(shape, execution)


def _count_rounded(shape: ModelShape, execution: MemorySetup) -> float:
    """Count the bytes of 16-bit copies of what trains, which autocast keeps until a forward pass ends."""
    if not execution.has_autocast or execution.trained_bytes == execution.compute_bytes:
        return 0.0
    all_weights = shape.linear_params + shape.vocab * shape.hidden
    return float(execution.compute_bytes * (all_weights if execution.trains_all else trained_params(shape, execution)))


def _count_reference(shape: ModelShape, execution: MemorySetup, *, strategy: Strategy, world_size: int) -> float:
    """Count the bytes of the frozen model: a second copy of all weights, or of the adapter that the run began with."""
    standing = standing_bytes(shape, execution)
    if not execution.trains_all:
        return standing.adapters
    if strategy.startswith("zero"):
        whole = standing.weights * HALF / execution.weight_bytes
        return whole / world_size if strategy.startswith("zero3") else whole
    return standing.weights / world_size if strategy.startswith("fsdp") else standing.weights


def forecast_sampling(cfg: RunConfig, shape: ModelShape, *, hardware: Hardware) -> Callable[[int], Forecast]:
    """Return the forecast of the phase in which so many completions are sampled at a time, without other phases."""
    setting = build_setting(cfg, shape, hardware=hardware, strategy=planned_strategy(cfg, hardware.world_size))
    size = Size(rows=1, seq=planned_tokens(cfg, hardware.lengths), accumulates=True)

    def forecast_completions(sampled: int) -> Forecast:
        seen = forecast(setting, size, sampled=sampled)
        phases = [found.phases[DRAW] for name, found in seen.by_device.items() if name != "cpu"]
        largest = max(phases or [seen.footprint.phases[DRAW]], key=lambda parts: sum(parts.values()))
        return replace(seen, footprint=Footprint({DRAW: largest}))

    return forecast_completions


ENOUGH = 4
"""Completions of a group from which on their rewards differ in more than two ways: with 2, an advantage is 0 or the
same number up and down."""

FP32_HEAD = "cast_lm_head_to_fp32"
"""Field of TRL's GRPOConfig: the head computes in fp32, which keeps large scores from overflowing fp16."""

OLDEST_TRL = "1.16"  # the first release that takes log-probabilities in the tiles that `train.upstream` narrows


def refuse_parts(cfg: RunConfig, shape: ModelShape | None, *, hardware: Hardware) -> None:
    """Check that a rollout batch goes together with what each process holds and samples. Raise ConfigError where it
    does not, MachineError where vLLM's share of a GPU does not hold the model and one completion.
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
            "grpo.score_centering", is_sharded and grpo.score_centering is not None,
            f"it reads the whole output head, which {strategy} holds in parts",
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
            raise ConfigError(what, where=cfg.describe_origin(key, unset="grpo"), fix=fix)
    if shape is None or kind != "vllm_colocate":
        return
    device_bytes, share = hardware.device.total_bytes, grpo.vllm.memory_share
    one = cache_bytes(shape, read_memory_setup(cfg), completions=1, tokens=cfg.row_tokens)
    need = (2 * shape.total_params + one) / grpo.vllm.tensor_parallel
    if need > (room := share * device_bytes):
        raise MachineError(
            f"{share:g} of the GPU is {format_bytes(int(room))}, but vLLM needs {format_bytes(int(need))} "
            "for the model in 16 bits and one completion",
            where=cfg.describe_origin("grpo.vllm.memory_share", unset="grpo"),
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


def keeps_groups(cfg: RunConfig) -> bool:
    """Return whether a micro-batch surely holds the completions of few prompts: it is asked for, and the micro-batches
    of a step can be ordered (`shared_groups.depends_on_cut`)."""
    grpo = cfg.grpo
    is_free = grpo.loss_type != "bnpo" and grpo.top_entropy_quantile == 1 and not grpo.entropy_coef and not grpo.extra
    return grpo.share_prompts is True and is_free and grpo.steps_per_generation == 1


def decide_shared_prompts(cfg: RunConfig, shape: ModelShape | None, *, strategy: str) -> Decision:
    """Decide whether prompts may be computed once: where that costs less at full length, by products and attention."""
    prompt, completion, rows = cfg.prompt_tokens, cfg.grpo.max_completion_length, cfg.train.batch_size
    number = max(1, cfg.grpo.num_generations // cfg.grpo.steps_per_generation)  # TRL mixes those of several steps
    number = min(number, rows) if isinstance(rows, int) else number
    if strategy in ("zero3", "fsdp"):
        return Decision(
            False, f"what allows it cannot be proved where processes hold parts of the weights ({strategy})"
        )
    if cfg.grpo.score_centering is not None:
        return Decision(False, "grpo.score_centering takes the scores of rows")
    if cfg.model.attn not in ("sdpa", "auto"):
        return Decision(False, f"{cfg.model.attn} attention has no blocks for it; sdpa has")
    products, pair, label = 1.0, 0.0, 0.0
    if shape is not None:
        products, label = float(shape.product_params), float(shape.vocab * shape.hidden)
        pair = float(2 * shape.layers * shape.heads * shape.head_dim)
    plain = number * ((prompt + completion) * products + (prompt + completion) ** 2 / 2 * pair + completion * label)
    blocks = prompt**2 / 2 + number * completion * (prompt + completion)
    once = (prompt + number * completion) * products + blocks * pair + number * completion * label
    gain = plain / (BLOCK_COST * once)
    lengths = f"a prompt of {prompt} tokens for {number} completion{'s' if number > 1 else ''} of {completion}"
    if gain <= 1:
        return Decision(False, f"{lengths} would take {1 / gain:.1f} times as long to learn from once as in rows")
    return Decision("auto", f"{lengths}, once: {gain:.1f} times as fast to learn from, where a proof allows it")


class GrpoPlan(TaskSizing, TaskReport):
    """Completions are sampled and scored before the model learns from them."""

    def unit(self, cfg: RunConfig) -> str:
        return "completions"

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
            group=grpo.num_generations if grpo.generation == "transformers" else 1,
            drawn=count_batch_completions(cfg) // hardware.world_size if hardware.device.is_gpu else 0,
            limits_probability=grpo.top_p < 1,
            engine=grpo.generation,
            engine_bytes=engine_bytes,
            engine_sleeps=grpo.vllm.sleep,
            learned_group=grpo.num_generations if keeps_groups(cfg) else 0,
        )

    def refuse_machine(self, cfg: RunConfig, machine: Machine, *, world_size: int) -> None:
        kind, split = cfg.grpo.generation, cfg.grpo.vllm.tensor_parallel
        release = machine.libraries.get("trl")
        if release is not None and not is_within(release, f">={OLDEST_TRL}"):
            raise MachineError(
                f"task_mode grpo needs trl {OLDEST_TRL} or newer, and trl {release} is installed",
                where=cfg.describe_origin("task_mode"),
                fix=f"pip install 'trl>={OLDEST_TRL}'; unsloth wants an older one, so use an environment without it",
            )
        if kind == "transformers":
            return
        where, fix = cfg.describe_origin("grpo.generation", unset="grpo"), "write grpo.generation: transformers"
        uses_vllm = kind != "continuous"
        if old := [gpu for gpu in machine.gpus if not gpu.has_bf16]:
            capability = ".".join(map(str, old[0].capability))
            why = f"{old[0].name} has compute capability {capability}, and below 8.0 only transformers is offered: "
            why += "vLLM's wheels leave out the oldest of these cards" if uses_vllm else "nobody has tried it"
            raise MachineError(why, where=where, fix=fix)
        if uses_vllm and (problem := vllm_problem() if find_python() else "vLLM is not installed"):
            raise MachineError(problem, where=where, fix=f"{VLLM_INSTALL}, or {fix}")
        if kind == "vllm_colocate" and not machine.gpus and world_size > 1:
            why = f"without a GPU vLLM samples in one process, and there are {world_size}"
            raise MachineError(why, where=where, fix="use one process, or write grpo.generation: vllm_server")
        if kind == "vllm_colocate" and world_size % split:
            raise ConfigError(
                f"{split} does not divide {world_size} process(es)",
                where=cfg.describe_origin("grpo.vllm.tensor_parallel", unset="grpo"),
                fix=f"write {math.gcd(split, world_size)}, or use another number of processes",
            )

    def fixed_head(self, cfg: RunConfig) -> Decision | None:
        return Decision("chunked", "TRL takes the probabilities of completions in tiles of 4096 tokens x 32768 words")

    def decide_sampling(self, cfg: RunConfig, shape: ModelShape | None, *, hardware: Hardware) -> Decisions:
        refuse_parts(cfg, shape, hardware=hardware)
        share = max(1, count_batch_completions(cfg) // hardware.world_size)
        strategy = planned_strategy(cfg, hardware.world_size)
        shared = {"grpo.share_prompts": decide_shared_prompts(cfg, shape, strategy=strategy)}
        if cfg.grpo.generation.startswith("vllm"):
            why = f"{cfg.grpo.generation} takes all of a rollout batch and queues them itself"
            return {**shared, "grpo.generation_rows": Decision(share, why)}
        forecast = forecast_sampling(cfg, shape, hardware=hardware) if shape is not None else None
        return {**shared, "grpo.generation_rows": decide_rows_at_once(share, forecast)}

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
