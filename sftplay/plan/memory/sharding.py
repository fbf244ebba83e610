"""What data-parallel strategies add to a device, split over the devices, or move to the host.

ZeRO: Rajbhandari et al. 2020, table 1, with DeepSpeed's mixed precision (16-bit weights and gradients, fp32 master
weights and moments). FSDP: shards in the weights' own dtype, gathered in 16 bits; compared with public measurements on
two GPUs. ZeRO has not been; `budget` plans both with a wider margin.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from sftplay.plan.memory.layer import FP32
from sftplay.plan.memory.memory_setup import MemorySetup, trained_params
from sftplay.plan.memory.step import ALONE, SHARDING, Communication, StaticMemory
from sftplay.plan.shape.model_shape import ModelShape

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
