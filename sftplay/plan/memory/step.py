"""The closed form: bytes on one device at each phase of a training step, from a shape, a code path and a size.

It allocates nothing and imports no torch. What several devices share or split is `sharding`'s business. Figures are
what torch's allocator hands out (`max_memory_allocated`); the process around it is added by `budget`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sftplay.plan.memory.execution import Execution, trained_params
from sftplay.plan.memory.head import head_in_backward, head_in_forward
from sftplay.plan.memory.layer import FP32, copies_of_stream, layer_bytes, norm_kept, norm_moment, stream_bytes
from sftplay.plan.shape.model_shape import ModelShape

WORKSPACE_BYTES = 2 * (2 * 4096 + 8 * 16) * 1024
"""cuBLAS takes 8.125 MiB a handle from torch's allocator (torch, CUBLAS_WORKSPACE_CONFIG default :4096:2:16:8); the
forward and the backward thread have a handle each."""

MASK_BYTES = 1
"""An entry of the mask of booleans that transformers makes for all layers (`sdpa_mask`)."""

BIAS_BYTES = 2
"""An entry of the bias that the memory-efficient kernel makes of it in each layer and keeps for that layer's backward
(torch, `convert_boolean_attn_mask`)."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """One micro-batch: `rows` of `seq` tokens each, padded; `labelled` of all tokens carry a label (None: all)."""

    rows: int
    seq: int
    labelled: int | None = None
    accumulates: bool = False
    """True when an optimizer step has several micro-batches: gradients then lie there during all but the first."""

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
class Standing:
    """What lies in memory throughout, in bytes."""

    weights: float
    adapters: float
    gradients: float
    optimizer: float


def standing_bytes(shape: ModelShape, path: Execution) -> Standing:
    """Weights, adapters, gradients and optimizer state of a model that no one shares."""
    trained = trained_params(shape, path)
    others = shape.total_params - shape.linear_params + shape.vision_params
    return Standing(
        weights=shape.linear_params * path.linear_bytes + others * path.weight_bytes,
        adapters=0.0 if path.trains_all else float(trained * path.trained_bytes),
        gradients=float(trained * path.trained_bytes),
        optimizer=trained * path.state_bytes,
    )


def estimate(
    shape: ModelShape, path: Execution, size: Size, *, standing: Standing | None = None, buffers: float = 0.0
) -> Footprint:
    """Bytes of every phase of one optimizer step on one device, in the steady state.

    `standing` is the device's part of what lies there throughout, None for all of it; `buffers` is what communication
    adds. The optimizer's state exists from the second step on, so the first step may fit where later ones do not.
    """
    standing = standing or standing_bytes(shape, path)
    resident = {
        "weights": standing.weights,
        "adapters": standing.adapters,
        "optimizer": standing.optimizer,
        "buckets and sharding": buffers,
        "workspace": float(WORKSPACE_BYTES),
    }
    if path.is_masked:
        resident["mask"] = float(_mask_bytes(shape, path) * size.rows * size.seq**2)
    step = {"gradients": standing.gradients, "optimizer step": standing.gradients if path.is_foreach else 0.0}
    return Footprint(
        {
            "head": {**resident, **_head_phase(shape, path, size, standing)},
            "layer": {**resident, **_layer_phase(shape, path, size, standing)},
            "step": {**resident, "mask": 0.0, **step},
        }
    )


def _mask_bytes(shape: ModelShape, path: Execution) -> int:
    """Of an entry of rows x tokens x tokens; under checkpointing one layer's bias lives at a time."""
    if path.attention == "eager":
        return MASK_BYTES + BIAS_BYTES
    return MASK_BYTES + BIAS_BYTES * (1 if path.checkpointing else shape.layers)


def kept_bytes(shape: ModelShape, path: Execution, size: Size) -> float:
    """What all layers keep from forward to backward: their inputs, or with checkpointing off everything."""
    if path.checkpointing:
        return float(shape.layers * size.tokens * shape.hidden * stream_bytes(shape, path))
    kept = shape.layers * layer_bytes(shape, path, size.tokens, size.seq).kept
    # Without a gradient to hand to the frozen embedding, the norms that read it keep nothing.
    first_norms = copies_of_stream(shape, path) if shape.parallel_block else 1
    return kept if path.trains_all else kept - first_norms * size.tokens * norm_kept(shape, path)


def _head_phase(shape: ModelShape, path: Execution, size: Size, standing: Standing) -> dict[str, float]:
    """The end of forward or the begin of backward, whichever holds more."""
    labelled = size.tokens if size.labelled is None else size.labelled
    fullest = max(
        head_in_forward(shape, path, size.tokens, labelled) + _rounded_layers(shape, path),
        head_in_backward(shape, path, size.tokens, labelled),
    )
    waiting = standing.gradients if size.accumulates else 0.0
    return {"gradients": waiting, "activations": kept_bytes(shape, path, size), "head": fullest}


def _layer_phase(shape: ModelShape, path: Execution, size: Size, standing: Standing) -> dict[str, float]:
    """Backward in the layer it enters first, or in the one it leaves last: gradients grow while activations go."""
    layer = layer_bytes(shape, path, size.tokens, size.seq)
    kept, gradients = kept_bytes(shape, path, size), standing.gradients
    own = layer.peak if path.checkpointing else layer.peak - layer.kept
    if path.checkpointing and shape.norm == "layer" and stream_bytes(shape, path) == FP32:
        own -= size.tokens * norm_kept(shape, path)  # the first norm keeps the layer's input, which is there already
    early, late = (gradients, gradients) if size.accumulates else _gradients_by_then(shape, path, gradients)
    first = {"gradients": early, "activations": kept, "layer": own}
    last = {"gradients": late, "activations": kept / shape.layers, "layer": own}
    embedding = {"gradients": gradients, "layer": _embedding_moment(shape, path, size)}
    last_norm = size.tokens * (norm_kept(shape, path) + norm_moment(shape, path))
    norm = {"gradients": early, "activations": kept, "layer": last_norm}
    return max(first, last, norm, embedding, key=lambda phase: sum(phase.values()))


def _embedding_moment(shape: ModelShape, path: Execution, size: Size) -> float:
    """Gradient of the stream, and of the embedding where it meets the head's before both become the tied weight's."""
    stream = float(size.tokens * shape.hidden * stream_bytes(shape, path))
    if not path.trains_all:
        return stream
    own = shape.vocab * shape.hidden * path.trained_bytes
    # The head's gradient is a transposed view unless autocast rounded the weight; the engine adds to no view in place.
    is_rounded = path.has_autocast and path.weight_bytes != path.compute_bytes
    is_view = path.head == "standard" and not is_rounded
    return stream + own * (shape.tied * (1 + is_view) + size.accumulates)


def _gradients_by_then(shape: ModelShape, path: Execution, gradients: float) -> tuple[float, float]:
    """Gradients that exist when backward is in the layer it enters first, and in the one it leaves last.

    The head's is the first to be made and, untied, the embedding's the last.
    """
    trained = trained_params(shape, path)
    head = shape.vocab * shape.hidden / trained if path.trains_all else 0.0
    layers = (shape.total_params - shape.other_params) / trained if path.trains_all else 1.0
    return gradients * head, gradients * (head + layers * (shape.layers - 1) / shape.layers)


def _rounded_layers(shape: ModelShape, path: Execution) -> float:
    """16-bit copies of what trains in the layers; autocast keeps them from their first use to the end of forward."""
    is_kept = not path.checkpointing  # then they are among the activations
    if is_kept or not path.has_autocast or path.trained_bytes == path.compute_bytes:
        return 0.0
    return float(path.compute_bytes * (shape.linear_params if path.trains_all else trained_params(shape, path)))
