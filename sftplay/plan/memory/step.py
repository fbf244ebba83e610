"""The closed form: bytes on one device at each phase of a training step, from a shape, an execution and a size.

It allocates nothing and imports no torch. `sharding` splits the figures over several devices. They are what torch's
allocator hands out (`max_memory_allocated`); `budget` adds the process around it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sftplay.plan.memory.head import copied_end, head_in_backward, head_in_forward
from sftplay.plan.memory.layer import FP32, copies_of_stream, layer_bytes, norm_kept, norm_moment, stream_bytes
from sftplay.plan.memory.memory_setup import MemorySetup, trained_params
from sftplay.plan.shape.model_shape import ModelShape

MASK_BYTES = 1
"""An entry of the mask of booleans that transformers makes for all layers (`sdpa_mask`)."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """One micro-batch: `rows` of `seq` tokens each, padded; `labelled` of all tokens carry a label (None: all)."""

    rows: int
    seq: int
    labelled: int | None = None
    accumulates: bool = False
    """True when an optimizer step has several micro-batches: all but the first then run beside whole gradients."""

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

    buffers: float = 0.0
    """Held throughout a step."""

    gathered: float = 0.0
    """Whole weights outside the layers and of the layer at work; none are left when the optimizer steps."""

    ahead: float = 0.0
    """Whole weights of the layer after that, fetched before they are needed."""


ALONE = Communication()
SHARDING = "buckets and sharding"


def standing_bytes(shape: ModelShape, execution: MemorySetup) -> StaticMemory:
    """Weights, adapters, gradients and optimizer state of a model that one device holds alone."""
    trained = trained_params(shape, execution)
    others = shape.total_params - shape.linear_params + shape.vision_params
    return StaticMemory(
        weights=shape.linear_params * execution.linear_bytes + others * execution.weight_bytes,
        adapters=0.0 if execution.trains_all else float(trained * execution.trained_bytes),
        gradients=float(trained * execution.trained_bytes),
        optimizer=trained * execution.state_bytes,
    )


def estimate(
    shape: ModelShape,
    execution: MemorySetup,
    *,
    size: Size,
    standing: StaticMemory | None = None,
    communication: Communication = ALONE,
) -> Footprint:
    """Bytes of every phase of one optimizer step on one device, in the steady state.

    `standing` is the device's part of what is held throughout, None for all of it. The optimizer's state exists from
    the second step on, so the first step may fit where later ones do not.
    """
    standing = standing or standing_bytes(shape, execution)
    resident = {
        "weights": standing.weights,
        "adapters": standing.adapters,
        "optimizer": standing.optimizer,
        SHARDING: communication.buffers + communication.gathered,
        "workspace": float(execution.workspace_bytes),
    }
    if execution.is_masked:
        resident["mask"] = float(_mask_bytes(shape, execution) * size.rows * size.seq**2)
    layer = _layer_phase(shape, execution, size=size, standing=standing, communication=communication)
    step = {"gradients": standing.gradients, "optimizer step": standing.gradients if execution.is_foreach else 0.0}
    return Footprint(
        {
            "head": {**resident, **_head_phase(shape, execution, size=size, standing=standing)},
            "layer": {**resident, **layer},
            "step": {**resident, "mask": 0.0, SHARDING: communication.buffers, **step},
        }
    )


def bias_bytes(execution: MemorySetup) -> int:
    """Of an entry of the bias that the memory-efficient kernel makes of the mask in each layer, in its queries' dtype,
    and keeps for that layer's backward (torch, `convert_boolean_attn_mask`). transformers makes the eager one, in the
    dtype of the embeddings (`eager_mask`)."""
    return execution.weight_bytes if execution.attention == "eager" else execution.compute_bytes


def _mask_bytes(shape: ModelShape, execution: MemorySetup) -> int:
    """Of an entry of rows x tokens x tokens; under checkpointing one layer's bias lives at a time."""
    is_one = execution.attention == "eager" or execution.checkpointing
    return MASK_BYTES + bias_bytes(execution) * (1 if is_one else shape.layers)


def kept_bytes(shape: ModelShape, execution: MemorySetup, *, size: Size) -> float:
    """What all layers keep from forward to backward: their inputs, or with checkpointing off everything."""
    if execution.checkpointing:
        return float(shape.layers * size.tokens * shape.hidden * stream_bytes(shape, execution))
    kept = shape.layers * layer_bytes(shape, execution, tokens=size.tokens, seq=size.seq).kept
    # Without a gradient to hand to the frozen embedding, the norms that read it keep nothing.
    first_norms = copies_of_stream(shape, execution) if shape.parallel_block else 1
    if execution.trains_all or execution.trains_rows:
        return kept
    return kept - first_norms * size.tokens * norm_kept(shape, execution)


def _head_phase(shape: ModelShape, execution: MemorySetup, *, size: Size, standing: StaticMemory) -> dict[str, float]:
    """The end of forward or the beginning of backward, whichever holds more."""
    labelled = size.tokens if size.labelled is None else size.labelled
    fullest = max(
        head_in_forward(shape, execution, tokens=size.tokens, labelled=labelled) + _rounded_layers(shape, execution),
        head_in_backward(shape, execution, tokens=size.tokens, labelled=labelled),
    )
    waiting = standing.gradients if size.accumulates else 0.0
    return {"gradients": waiting, "activations": kept_bytes(shape, execution, size=size), "head": fullest}


def _layer_phase(
    shape: ModelShape, execution: MemorySetup, *, size: Size, standing: StaticMemory, communication: Communication
) -> dict[str, float]:
    """Backward in the layer it enters first, or in the one it leaves last: gradients grow while activations go."""
    layer = layer_bytes(shape, execution, tokens=size.tokens, seq=size.seq)
    kept, gradients = kept_bytes(shape, execution, size=size), standing.gradients
    own = layer.peak if execution.checkpointing else layer.peak - layer.kept
    if execution.checkpointing and shape.norm == "layer" and stream_bytes(shape, execution) == FP32:
        own -= size.tokens * norm_kept(
            shape, execution
        )  # the first norm keeps the layer's input, which is there already
    early, late = (
        (gradients, gradients) if size.accumulates else _gradients_by_then(shape, execution, gradients=gradients)
    )
    left = kept / shape.layers
    if execution.checkpointing and execution.holds_inputs:
        # In the last layer all inputs are there, and the gradients of the others' save the one that enters it.
        left = kept * (1 + max(0, shape.layers - 2) / shape.layers)
    last_norm = size.tokens * (norm_kept(shape, execution) + norm_moment(shape, execution))
    end = communication.buffers + communication.gathered
    start = end + communication.ahead
    first = {SHARDING: start, "gradients": early, "activations": kept, "layer": own}
    norm = {SHARDING: start, "gradients": early, "activations": kept, "layer": last_norm}
    last = {SHARDING: end, "gradients": late, "activations": left, "layer": own}
    embedding = {SHARDING: end, "gradients": gradients, "layer": _embedding_moment(shape, execution, size=size)}
    fullest = max(first, last, norm, embedding, key=lambda phase: sum(phase.values()))
    return {**fullest, "held scores": _held_scores(shape, execution, size=size)}


def _held_scores(shape: ModelShape, execution: MemorySetup, *, size: Size) -> float:
    """The model's output, where the caller keeps it while backward runs through the layers."""
    return float(execution.logits_bytes * size.tokens * shape.vocab) if execution.holds_scores else 0.0


def _embedding_moment(shape: ModelShape, execution: MemorySetup, *, size: Size) -> float:
    """Gradient of the stream, and of the embedding where it meets the head's before both become the tied weight's."""
    stream = float(size.tokens * shape.hidden * stream_bytes(shape, execution))
    if not execution.trains_all:
        return stream + copied_end(shape, execution)
    own = shape.vocab * shape.hidden * execution.trained_bytes
    # The head's gradient is a transposed view unless autocast rounded the weight; the engine adds to no view in place.
    is_rounded = execution.has_autocast and execution.weight_bytes != execution.compute_bytes
    is_view = execution.head == "standard" and not is_rounded
    return stream + own * (shape.tied * (1 + is_view) + size.accumulates)


def _gradients_by_then(shape: ModelShape, execution: MemorySetup, *, gradients: float) -> tuple[float, float]:
    """Gradients that exist when backward is in the layer it enters first, and in the one it leaves last.

    The head's is the first to be made and, untied, the embedding's the last.
    """
    trained = trained_params(shape, execution)
    head = shape.vocab * shape.hidden / trained if execution.trains_all else 0.0
    layers = (shape.total_params - shape.other_params) / trained if execution.trains_all else 1.0
    return gradients * head, gradients * (head + layers * (shape.layers - 1) / shape.layers)


def _rounded_layers(shape: ModelShape, execution: MemorySetup) -> float:
    """16-bit copies of what trains in the layers; autocast keeps them from their first use to the end of forward."""
    is_kept = not execution.checkpointing  # then they are among the activations
    if is_kept or not execution.has_autocast or execution.trained_bytes == execution.compute_bytes:
        return 0.0
    return float(
        execution.compute_bytes * (shape.linear_params if execution.trains_all else trained_params(shape, execution))
    )
