"""What data-parallel strategies add to a device, split over the devices, or move to the host.

ZeRO: Rajbhandari et al. 2020, table 1, with DeepSpeed's mixed precision (16-bit weights and gradients, fp32 master
weights and moments). FSDP: fp32 shards, gathered in 16 bits. Only single-GPU figures have been compared with
measurements; `budget` plans the others with a wider margin.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from sftplay.plan.memory.execution import Execution, trained_params
from sftplay.plan.memory.step import Standing
from sftplay.plan.shape.model_shape import ModelShape

Strategy = Literal["single", "ddp", "zero1", "zero2", "zero3", "fsdp", "zero2_offload", "zero3_offload", "fsdp_offload"]

STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)

BUCKET_ELEMENTS = 500_000_000
"""Size of DeepSpeed's reduce bucket and of its all-gather bucket (deepspeed 0.19, `zero/config.py`)."""

HALF = 2
FP32 = 4
PINNED = 1.5
"""Host memory of pinned buffers over their content; the allocator rounds up to powers of two."""


@dataclass(frozen=True)
class DeviceShare:
    """One device's part: what it holds throughout a step, what communication adds, and what lies on the host."""

    standing: Standing
    buffers: float = 0.0
    host: float = 0.0


def share_of(
    shape: ModelShape, execution: Execution, *, standing: Standing, strategy: Strategy, world_size: int
) -> DeviceShare:
    """The part of one of `world_size` devices under `strategy`."""
    if strategy == "single":
        return DeviceShare(standing)
    if strategy == "ddp":
        # torch copies gradients into buckets (DistributedDataParallel, gradient_as_bucket_view=False).
        return DeviceShare(standing, buffers=standing.gradients)
    if strategy.startswith("fsdp"):
        return _fsdp(shape, execution, standing=standing, world_size=world_size, to_host=strategy.endswith("offload"))
    return _zero(shape, execution, standing=standing, strategy=strategy, world_size=world_size)


def _zero(
    shape: ModelShape, execution: Execution, *, standing: Standing, strategy: Strategy, world_size: int
) -> DeviceShare:
    stage, to_host = int(strategy[4]), strategy.endswith("offload")
    trained = trained_params(shape, execution)
    weights = standing.weights * HALF / execution.weight_bytes if execution.trains_all else standing.weights
    adapters = 0.0 if execution.trains_all else float(trained * HALF)
    whole = weights + adapters
    if stage == 3:
        gathered = min(_gathered(shape, HALF, weights=weights), whole * (1 - 1 / world_size))
        weights, adapters = weights / world_size, adapters / world_size
    else:
        gathered = 0.0
    gradients = trained * HALF / (world_size if stage >= 2 else 1)
    # Each stage reduces through a bucket; stages 1 and 2 gather the updated weights through another.
    bucket = HALF * min(BUCKET_ELEMENTS, trained)
    buffers = gathered + bucket * (1 if stage == 3 else 2)
    optimizer = trained * (FP32 + 2 * FP32) / world_size
    host = 0.0
    if to_host:
        host, optimizer = PINNED * (optimizer + trained * FP32 / world_size), 0.0
        if stage == 3:
            host, weights, adapters = host + PINNED * (weights + adapters), 0.0, 0.0
    return DeviceShare(Standing(weights, adapters, gradients, optimizer), buffers, host)


def _fsdp(
    shape: ModelShape, execution: Execution, *, standing: Standing, world_size: int, to_host: bool
) -> DeviceShare:
    gathered = min(
        _gathered(shape, execution.compute_bytes, weights=standing.weights), standing.weights * (1 - 1 / world_size)
    )
    parts = Standing(*(part / world_size for part in vars(standing).values()))
    if not to_host:
        return DeviceShare(parts, gathered)
    host = PINNED * sum(vars(parts).values())
    return DeviceShare(Standing(0.0, 0.0, 0.0, 0.0), gathered, host)


def _gathered(shape: ModelShape, dtype_bytes: int, *, weights: float) -> float:
    """Whole weights on a device at a time: this layer, the next, which is fetched ahead, and those outside layers."""
    layer = (shape.total_params - shape.other_params) / shape.layers
    root = shape.other_params * dtype_bytes
    per_weight = min(float(dtype_bytes), (weights - root) / max(1, shape.layers * layer)) if weights > root else 0.0
    return root + 2 * layer * per_weight
