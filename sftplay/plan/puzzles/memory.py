"""The closed form: bytes at each phase of a training step of puzzles, from a shape, a precision and a size.

It allocates nothing and imports no torch. Memory does not grow with the number of cycles where the gradient goes one
step back: only the last call of each module keeps anything.
"""

from __future__ import annotations

from dataclasses import dataclass

from sftplay.plan.memory.memory_setup import WORKSPACE_BYTES
from sftplay.plan.memory.step import Footprint
from sftplay.plan.puzzles.weights import PuzzleShape

FP32, FP64, INT64 = 4, 8, 8

NORM_INPUTS = 2
"""Inputs of the two norms of a block; they are kept in fp32."""

STREAMS, ROTATED = 6, 2
"""Of a block, in the type of the computation and as wide as the model: its input, queries, keys and values as one, the
output of attention, and the input of the feed-forward layer; queries and keys again where they are rotated."""

INNERS = 4
"""The two halves of SwiGLU, the activated one, and their product."""

NORM_MOMENT = 4
"""Tensors as wide as the model in the backward pass of a norm, in fp32."""

SCORES = 6
"""Copies of a segment's scores in the type of the loss, forward and backward."""


@dataclass(frozen=True, kw_only=True)
class PuzzleSize:
    """Rows of a process, and how many of them at a time."""

    rows: int
    micro_batch: int

    @property
    def accumulates(self) -> bool:
        """Whether a step has several micro-batches."""
        return self.micro_batch < self.rows


def puzzle_footprint(
    shape: PuzzleShape, *, size: PuzzleSize, compute_bytes: int, processes: int = 1, workspace: int = WORKSPACE_BYTES
) -> Footprint:
    """Bytes of every phase of one step on one device, in the steady state.

    `compute_bytes` are those of a number of the computation; `processes` exchange gradients. `workspace`
    is what cuBLAS takes, 0 without a GPU.
    """
    hrm, weights = shape.hrm, float(FP32 * shape.weights)
    tokens, at_once = (rows * shape.positions for rows in (size.rows, size.micro_batch))
    state = 2 * hrm.hidden_size * compute_bytes
    puzzles = 2 * size.rows * shape.grid.cells * INT64
    resident = _resident(shape, processes=processes, workspace=workspace)
    # The state before the step, the same with new puzzles in it, and what the micro-batches have made of it.
    carry = float(3 * tokens * state + 3 * puzzles)
    before = {
        **resident,
        "gradients": weights if size.accumulates else 0.0,
        "carry": carry,
        "activations": _kept(shape, tokens=at_once, compute_bytes=compute_bytes),
    }
    looks_ahead = hrm.q_continue and hrm.n_supervision > 1
    ahead = _running(shape, tokens=at_once * looks_ahead, compute_bytes=compute_bytes, streams=4)
    scores = _scores(shape, rows=size.micro_batch, compute_bytes=compute_bytes)
    phases = {
        "segment": {**before, "second pass": ahead, "head": scores},
        "layer": {**before, "layer": _undone(shape, tokens=at_once, compute_bytes=compute_bytes)},
        "step": {
            **resident,
            "gradients": weights,
            "carry": carry + tokens * state * size.accumulates,  # parts of it are put together
            "optimizer step": _optimizer_moment(shape),
        },
        "evaluation": {
            **resident,
            "average": resident["average"] * 2,  # the trained weights are put aside meanwhile
            "carry": float((tokens + at_once) * state + 2 * puzzles),
            "layer": _running(shape, tokens=at_once, compute_bytes=compute_bytes, streams=6),
        },
    }
    if (whole := collected_bytes(shape, processes)) and not workspace:
        # Only the main process collects, and all share one memory.
        phases["checkpoint"] = {**resident, "carry": carry, "collected table": whole / processes}
    return Footprint(phases)


def collected_bytes(shape: PuzzleShape, processes: int) -> float:
    """The whole table on the main process's host while it is written; 0 where each process has it anyway."""
    return float(FP32 * shape.table) if shape.held(processes) < shape.table else 0.0


def _resident(shape: PuzzleShape, *, processes: int, workspace: int) -> dict[str, float]:
    """What is held throughout."""
    weights = float(FP32 * shape.weights)
    return {
        "weights": weights + FP32 * 2 * shape.hrm.hidden_size,
        "table": float(FP32 * shape.held(processes)),
        "average": weights if shape.hrm.ema else 0.0,
        "optimizer": 2 * weights,
        "buckets and sharding": weights if processes > 1 else 0.0,
        "workspace": float(workspace),
    }


def _running(shape: PuzzleShape, *, tokens: int, compute_bytes: int, streams: int) -> float:
    """A pass without gradients in its fullest moment: within SwiGLU, beside so many tensors as wide as the model."""
    token = INNERS * shape.inner + streams * shape.hrm.hidden_size
    return float(compute_bytes * tokens * token) + _rounded(shape, compute_bytes)


def _scores(shape: PuzzleShape, *, rows: int, compute_bytes: int) -> float:
    """The states of the cells as the head reads them, their scores, and these in the type of the loss."""
    cell = compute_bytes * (shape.hrm.hidden_size + shape.grid.words)
    loss_bytes = FP64 if shape.hrm.loss_precision == "fp64" else FP32
    return float(rows * shape.grid.cells * (cell + SCORES * loss_bytes * shape.grid.words))


def _kept(shape: PuzzleShape, *, tokens: int, compute_bytes: int) -> float:
    """What a segment keeps for its backward pass."""
    hrm = shape.hrm
    streams = STREAMS + (ROTATED if hrm.positions == "rope" else 0)
    token = compute_bytes * (streams * hrm.hidden_size + INNERS * shape.inner)
    token += FP32 * (NORM_INPUTS * hrm.hidden_size + hrm.num_heads + NORM_INPUTS)
    return shape.learned_blocks * (tokens * token + _rounded(shape, compute_bytes))


def _undone(shape: PuzzleShape, *, tokens: int, compute_bytes: int) -> float:
    """What the backward pass of the last block adds to all that is kept: in SwiGLU, whose product and whose norm's
    input are no longer needed then, or in a norm, where everything is fp32."""
    width = shape.hrm.hidden_size
    in_feed_forward = compute_bytes * (2 * shape.inner + width) - FP32 * width
    return float(tokens * max(in_feed_forward, NORM_MOMENT * FP32 * width))


def _rounded(shape: PuzzleShape, compute_bytes: int) -> float:
    """A block's weights in the type of the computation, made anew in each call; the weights themselves are fp32."""
    return float(compute_bytes * shape.block) if compute_bytes < FP32 else 0.0


def _optimizer_moment(shape: PuzzleShape) -> float:
    """What the optimizer makes for itself: fused AdamW nothing, AdamATan2 four copies of the largest weight."""
    largest = 2 * shape.hrm.hidden_size * shape.inner
    return float(FP32 * 4 * largest) if shape.hrm.optim == "adam_atan2" else 0.0
