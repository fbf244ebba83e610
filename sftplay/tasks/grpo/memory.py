"""The phases of a GRPO step: completions are sampled, scored without gradients where that is needed, and learned from.

Only one phase runs at a time, so the peak is the largest of them. A vLLM engine next to the trainer takes the share of
the card that it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from sftplay.config.run import RunConfig
from sftplay.plan.memory.forecast import Forecast, Hardware, Setting, forecast, with_loading
from sftplay.plan.memory.head import head_in_forward
from sftplay.plan.memory.layer import FP32, inner_bytes, stream_bytes
from sftplay.plan.memory.memory_setup import MemorySetup, trained_params
from sftplay.plan.memory.row_lengths import planned_tokens
from sftplay.plan.memory.sharding import HALF, DeviceShare, Strategy
from sftplay.plan.memory.step import (
    MASK_BYTES,
    SHARDING,
    Footprint,
    Size,
    bias_bytes,
    estimate,
    standing_bytes,
)
from sftplay.plan.shape.model_shape import ModelShape
from sftplay.plan.sizing.placement import planned_strategy
from sftplay.plan.sizing.task_sizing import build_setting
from sftplay.units import GIB

Engine = Literal["transformers", "continuous", "vllm_colocate", "vllm_server"]

DRAW, SCORE = "drawing", "scoring"

CACHE, REFERENCE, ENGINE = "key-value cache", "reference", "vLLM"

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

LIVE_STREAMS = 4
"""Residual streams that exist at a time in a forward pass without gradients: the embeddings, the input of a layer, the
output of its attention, and that after its norm."""

NORM_COPIES = 3  # fp32 copies of the stream in a norm


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
    limits_probability: bool = False  # True where the likeliest tokens are sorted out (top_p below 1)
    engine: Engine = "transformers"
    engine_bytes: int = 0  # the part of the card that vLLM takes (vllm_colocate)
    engine_sleeps: bool = False  # True where vLLM gives most of it back while the model is updated
    labels: ClassVar[Mapping[str, str]] = {
        SCORE: "while completions are scored without gradients",
        ENGINE: "vLLM's share",
        **SAMPLING_LABELS,
    }
    learners: ClassVar[int] = 1

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

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
        seq=rollout.tokens,
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
    return Footprint(phases)


def newest_token(shape: ModelShape, execution: MemorySetup, *, rollout: Rollout, score_bytes: int) -> dict[str, float]:
    """Return the larger of two moments of transformers' generation: the newest token at full length, or the prompts.

    `score_bytes` are those of a score of the newest token in all its copies.
    """
    number, prompt = rollout.completions, rollout.prompt_tokens
    rounded = _count_rounded(shape, execution)
    # A layer's keys are copied as they grow. One query a head reads keys that heads share (transformers, `pack_gqa`).
    grown = number * rollout.tokens * _keys_bytes(shape, execution)
    late = {
        CACHE: float(cache_bytes(shape, execution, completions=number, tokens=rollout.tokens)),
        "layer": float(grown),
        "head": float(number * shape.vocab * score_bytes) + rounded,
    }
    early = {
        CACHE: float(cache_bytes(shape, execution, completions=number, tokens=prompt)),
        "layer": forward_layer(shape, execution, rows=number, seq=prompt),
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
    norm = NORM_COPIES * FP32 * shape.hidden
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
