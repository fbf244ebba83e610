"""The closed form: bytes on one device at each phase of a training step, and what a strategy splits over devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from sftplay.plan.activations import (
    FP32,
    copied_end,
    copies_of_stream,
    head_in_backward,
    head_in_forward,
    layer_bytes,
    norm_kept,
    norm_moment,
    stream_bytes,
)
from sftplay.plan.memory_setup import MemorySetup, trained_params
from sftplay.plan.shape import ModelShape

MASK_BYTES = 1  # an entry of the mask of booleans that transformers makes for all layers (`sdpa_mask`)


@dataclass(frozen=True, kw_only=True)
class Size:
    """One micro-batch: `rows` of `seq` tokens each, padded; `labelled` of all tokens carry a label (None: all)."""

    rows: int
    seq: int
    labelled: int | None = None
    # True when an optimizer step has several micro-batches: all but the first then run while gradients are whole.
    accumulates: bool = False

    @property
    def tokens(self) -> int:
        return self.rows * self.seq


@dataclass(frozen=True)
class Footprint:
    """Bytes per phase and component; the phases follow each other, so the peak is the largest phase."""

    phases: Mapping[str, Mapping[str, float]]

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))

    @property
    def components(self) -> dict[str, int]:
        """Component -> bytes at the peak."""
        return {name: round(size) for name, size in self.phases[self.peak_phase].items()}

    @property
    def peak_bytes(self) -> int:
        return sum(self.components.values())


@dataclass(frozen=True)
class StaticMemory:
    """Bytes that are held throughout a step."""

    weights: float
    adapters: float
    gradients: float
    optimizer: float


@dataclass(frozen=True, kw_only=True)
class Communication:
    """Bytes that working with other devices adds to one device."""

    buffers: float = 0.0  # held throughout a step
    # Whole weights outside the layers and of the layer at work; none are left when the optimizer steps.
    gathered: float = 0.0
    ahead: float = 0.0  # whole weights of the layer after that, fetched before they are needed


ALONE = Communication()
SHARDING = "buckets and sharding"


def standing_bytes(shape: ModelShape, setup: MemorySetup) -> StaticMemory:
    """Count weights, adapters, gradients and optimizer state of a model that one device holds alone."""
    trained = trained_params(shape, setup)
    others = shape.total_params - shape.linear_params + shape.vision_params
    return StaticMemory(
        weights=shape.linear_params * setup.linear_bytes + others * setup.weight_bytes,
        adapters=0.0 if setup.trains_all else float(trained * setup.trained_bytes),
        gradients=float(trained * setup.trained_bytes),
        optimizer=trained * setup.state_bytes,
    )


def estimate(
    shape: ModelShape,
    setup: MemorySetup,
    *,
    size: Size,
    standing: StaticMemory | None = None,
    communication: Communication = ALONE,
) -> Footprint:
    """Estimate the bytes of every phase of one optimizer step on one device, in the steady state.

    `standing` is the device's part of what is held throughout, None for all of it. The optimizer's state exists from
    the second step on, so the first step may fit where later ones do not.
    """
    standing = standing or standing_bytes(shape, setup)
    resident = {
        "weights": standing.weights,
        "adapters": standing.adapters,
        "optimizer": standing.optimizer,
        SHARDING: communication.buffers + communication.gathered,
        "workspace": float(setup.workspace_bytes),
    }
    if setup.is_masked:
        # Under checkpointing one layer's bias lives at a time.
        biases = 1 if setup.attention == "eager" or setup.checkpointing else shape.layers
        entry = MASK_BYTES + bias_bytes(setup) * biases
        resident["mask"] = float(entry * size.rows * size.seq**2)
    # The end of forward or the beginning of backward, whichever holds more.
    labelled = size.tokens if size.labelled is None else size.labelled
    head = {
        "gradients": standing.gradients if size.accumulates else 0.0,
        "activations": kept_bytes(shape, setup, size=size),
        "head": max(
            head_in_forward(shape, setup, tokens=size.tokens, labelled=labelled) + _rounded_layers(shape, setup),
            head_in_backward(shape, setup, tokens=size.tokens, labelled=labelled),
        ),
    }
    layer = _layer_phase(shape, setup, size=size, gradients=standing.gradients, communication=communication)
    step = {"gradients": standing.gradients, "optimizer step": standing.gradients if setup.is_foreach else 0.0}
    return Footprint(
        {
            "head": {**resident, **head},
            "layer": {**resident, **layer},
            "step": {**resident, "mask": 0.0, SHARDING: communication.buffers, **step},
        }
    )


def bias_bytes(setup: MemorySetup) -> int:
    """Bytes of an entry of the bias that the memory-efficient kernel makes of the mask in each layer, in its queries'
    dtype, and keeps for that layer's backward (torch, `convert_boolean_attn_mask`). transformers makes the eager one,
    in the dtype of the embeddings (`eager_mask`)."""
    return setup.weight_bytes if setup.attention == "eager" else setup.compute_bytes


def kept_bytes(shape: ModelShape, setup: MemorySetup, *, size: Size) -> float:
    """Count what all layers keep from forward to backward: their inputs, or with checkpointing off everything."""
    if setup.checkpointing:
        return float(shape.layers * size.tokens * shape.hidden * stream_bytes(shape, setup))
    kept = sum(kind.layers * layer_bytes(kind, setup, tokens=size.tokens, seq=size.seq).kept for kind in shape.kinds)
    if setup.trains_all or setup.trains_rows:
        return kept
    # Without a gradient to hand to the frozen embedding, the norms that read it keep nothing.
    first_norms = copies_of_stream(shape, setup) if shape.parallel_block else 1
    return kept - first_norms * size.tokens * norm_kept(shape, setup)


def _layer_phase(
    shape: ModelShape, setup: MemorySetup, *, size: Size, gradients: float, communication: Communication
) -> dict[str, float]:
    """Backward in the layer it enters first, or in the one it leaves last: gradients grow while activations go."""
    kept, stream = kept_bytes(shape, setup, size=size), stream_bytes(shape, setup)
    works = []
    for kind in shape.kinds:
        layer = layer_bytes(kind, setup, tokens=size.tokens, seq=size.seq)
        works.append(layer.peak if setup.checkpointing else layer.peak - layer.kept)
        if setup.checkpointing and shape.norm == "layer" and stream == FP32:
            works[-1] -= size.tokens * norm_kept(shape, setup)  # the first norm keeps the input, which is there already
    work = max(works)
    early, late, of_layer = gradients, gradients, 0.0
    if not size.accumulates:
        # The head's gradient is the first to be made and, untied, the embedding's the last.
        trained = trained_params(shape, setup)
        head = shape.head_params / trained if setup.trains_all else 0.0
        layers = (shape.total_params - shape.other_params) / trained if setup.trains_all else 1.0
        early, late = gradients * head, gradients * (head + layers * (shape.layers - 1) / shape.layers)
        of_layer = gradients * layers / shape.layers
    left = kept / shape.layers
    if setup.checkpointing and setup.holds_inputs:
        # In the last layer all inputs are there, and the gradients of the others' save the one that enters it.
        left = kept * (1 + max(0, shape.layers - 2) / shape.layers)
    last_norm = size.tokens * (norm_kept(shape, setup) + norm_moment(shape))
    embedding = float(size.tokens * shape.hidden * stream)  # the stream's gradient
    if setup.trains_all:
        # The embedding's meets the head's before both become the tied weight's. The head's is a transposed view unless
        # autocast rounded the weight; the engine adds to no view in place.
        is_rounded = setup.has_autocast and setup.weight_bytes != setup.compute_bytes
        is_view = setup.head == "standard" and not is_rounded
        matrix = shape.vocab * shape.hidden * setup.trained_bytes
        embedding += matrix * (shape.tied * (1 + is_view) + size.accumulates)
    else:
        embedding += copied_end(shape, setup)
    end = communication.buffers + communication.gathered
    start = end + communication.ahead
    moments = (
        {SHARDING: start, "gradients": early, "activations": kept, "layer": work},
        *(
            # Backward leaves a kind of layers last in its first one, when layers before that are still to come.
            {SHARDING: end, "gradients": late - kind.starts_at * of_layer, "activations": left, "layer": last}
            for kind, last in zip(shape.kinds, works, strict=True)
        ),
        {SHARDING: start, "gradients": early, "activations": kept, "layer": last_norm},
        {SHARDING: end, "gradients": gradients, "layer": embedding},
    )
    fullest = max(moments, key=lambda moment: sum(moment.values()))
    held = setup.logits_bytes * size.tokens * shape.vocab if setup.holds_scores else 0
    return {**fullest, "held scores": float(held)}


def _rounded_layers(shape: ModelShape, setup: MemorySetup) -> float:
    """16-bit copies of what trains in the layers; autocast keeps them from their first use to the end of forward."""
    # Without checkpointing they are among the activations.
    if not setup.checkpointing or not setup.has_autocast or setup.trained_bytes == setup.compute_bytes:
        return 0.0
    return float(setup.compute_bytes * (shape.linear_params if setup.trains_all else trained_params(shape, setup)))


Strategy = Literal["single", "ddp", "zero1", "zero2", "zero3", "fsdp", "zero2_offload", "zero3_offload", "fsdp_offload"]

STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)

BUCKET_ELEMENTS = 500_000_000
"""Size of DeepSpeed's reduce bucket and of its all-gather bucket (deepspeed 0.19, `zero/config.py`)."""

HALF = 2
PINNED = 1.5  # host memory of pinned buffers over their content; the allocator rounds up to powers of two


@dataclass(frozen=True)
class DeviceShare:
    """One device's part: what it holds throughout a step, what communication adds, and what lies on the host."""

    standing: StaticMemory
    communication: Communication = ALONE
    host: float = 0.0


def find_share(
    shape: ModelShape, setup: MemorySetup, *, standing: StaticMemory, strategy: Strategy, world_size: int
) -> DeviceShare:
    """Return the part of one of `world_size` devices under `strategy`."""
    if strategy == "single":
        return DeviceShare(standing)
    if strategy == "ddp":
        # torch copies gradients into buckets (DistributedDataParallel, gradient_as_bucket_view=False).
        return DeviceShare(standing, Communication(buffers=standing.gradients))
    if strategy.startswith("zero"):
        return _zero(shape, setup, standing=standing, strategy=strategy, world_size=world_size)
    scales, elsewhere = _scales(shape, setup), standing.weights * (1 - 1 / world_size)
    codes = standing.weights - scales
    gathered = _gathered(shape, setup.compute_bytes, weights=codes, elsewhere=elsewhere)
    parts = StaticMemory(*(part / world_size for part in vars(replace(standing, weights=codes)).values()))
    if not strategy.endswith("offload"):
        return DeviceShare(replace(parts, weights=parts.weights + scales), gathered)
    return DeviceShare(StaticMemory(scales, 0.0, 0.0, 0.0), gathered, PINNED * sum(vars(parts).values()))


def loading_bytes(
    shape: ModelShape,
    setup: MemorySetup,
    *,
    standing: StaticMemory,
    share: DeviceShare,
    strategy: Strategy,
    is_on_host: bool = False,
) -> dict[str, float]:
    """Return what a device holds, at the most, while the model is opened and then split; nothing where it is not split.

    DeepSpeed moves the whole model to the device in 16 bits and then splits it weight by weight (deepspeed 0.19,
    `DeepSpeedEngine._configure_distributed_model`). accelerate keeps the weights as they were opened until all of them
    are split (1.15, `fsdp2_prepare_model`, `original_sd`): on the device they lie next to the shards. From the host
    torch moves one module at a time (2.13, `_fully_shard/_fsdp_init.py`, `_move_states_to_device`).
    """
    if strategy.startswith("zero3"):
        width = setup.compute_bytes / setup.weight_bytes if setup.trains_all else 1.0
        return {"weights": standing.weights * width, "adapters": standing.adapters}
    if not strategy.startswith("fsdp"):
        return {}
    shards = share.standing.weights + share.standing.adapters
    if is_on_host:
        layer = (shape.total_params - shape.other_params) / shape.layers
        return {"weights": max(layer, shape.vocab * shape.hidden) * setup.weight_bytes, SHARDING: shards}
    whole = {"weights": standing.weights, "adapters": standing.adapters}
    return {**whole, SHARDING: shards - _scales(shape, setup)}


def _zero(
    shape: ModelShape, setup: MemorySetup, *, standing: StaticMemory, strategy: Strategy, world_size: int
) -> DeviceShare:
    stage, to_host = int(strategy[4]), strategy.endswith("offload")
    trained = trained_params(shape, setup)
    weights = standing.weights * HALF / setup.weight_bytes if setup.trains_all else standing.weights
    adapters = 0.0 if setup.trains_all else float(trained * HALF)
    gathered, scales = ALONE, 0.0
    if stage == 3:
        scales, elsewhere = _scales(shape, setup), (weights + adapters) * (1 - 1 / world_size)
        gathered = _gathered(shape, HALF, weights=weights - scales, elsewhere=elsewhere)
        weights, adapters = (weights - scales) / world_size, adapters / world_size
    gradients = trained * HALF / (world_size if stage >= 2 else 1)
    # Each stage reduces through a bucket; stages 1 and 2 gather the updated weights through another.
    bucket = HALF * min(BUCKET_ELEMENTS, trained)
    communication = replace(gathered, buffers=bucket * (1 if stage == 3 else 2))
    optimizer = trained * (FP32 + 2 * FP32) / world_size
    host = 0.0
    if to_host:
        host, optimizer = PINNED * (optimizer + trained * FP32 / world_size), 0.0
        if stage == 3:
            host, weights, adapters = host + PINNED * (weights + adapters), 0.0, 0.0
    return DeviceShare(StaticMemory(weights + scales, adapters, gradients, optimizer), communication, host)


def _scales(shape: ModelShape, setup: MemorySetup) -> float:
    """What is whole on every device: shards are of parameters, and the scales of 4-bit weights are none
    (bitsandbytes, `Params4bit.quant_state`)."""
    return shape.linear_params * setup.scale_bytes


def _gathered(shape: ModelShape, dtype_bytes: int, *, weights: float, elsewhere: float) -> Communication:
    """Whole weights on a device at a time: those outside layers, this layer, and the next, which is fetched ahead.

    No more than `elsewhere`, the bytes that other devices hold.
    """
    layer = (shape.total_params - shape.other_params) / shape.layers
    root = shape.other_params * dtype_bytes
    per_weight = min(float(dtype_bytes), (weights - root) / max(1, shape.layers * layer)) if weights > root else 0.0
    gathered = min(root + layer * per_weight, elsewhere)
    return Communication(gathered=gathered, ahead=min(layer * per_weight, elsewhere - gathered))
