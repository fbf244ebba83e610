"""Decide the strategy by which processes share a model, and name it for the memory plan."""

from __future__ import annotations

import importlib.util

from sftplay.config.run import RunConfig
from sftplay.plan.memory.forecast import Hardware
from sftplay.plan.memory.sharding import Strategy
from sftplay.plan.shape.model_shape import ModelShape
from sftplay.plan.sizing.decisions import Decision
from sftplay.plan.sizing.task_sizing import find_sizing, forecast_one_row
from sftplay.units import format_bytes

STRATEGY = "cluster.strategy"


def planned_strategy(cfg: RunConfig, world_size: int) -> Strategy:
    """Return what the memory plan calls the strategy of a config in which it is decided."""
    if world_size == 1:
        return "single"
    # Within a node hsdp splits as fsdp does; over more nodes it copies, so this is the least it takes.
    kinds: dict[str, Strategy] = {"zero1": "zero1", "zero2": "zero2", "zero3": "zero3", "fsdp": "fsdp", "hsdp": "fsdp"}
    return kinds.get(cfg.cluster.strategy, "ddp")


def choose_strategy(cfg: RunConfig, shape: ModelShape | None, *, hardware: Hardware) -> Decision:
    """Choose the first of ddp, zero3 and fsdp that holds one row; ddp where none does or nothing can be said."""
    if hardware.world_size == 1:
        return Decision("ddp", "one process holds everything")
    if fixed := find_sizing(cfg).fixed_strategy(cfg):
        return fixed
    if shape is None:
        return Decision("ddp", "the model's shape is not known here, so nothing says that it must be split")
    if not hardware.device.is_gpu:
        return Decision("ddp", "processes on CPUs share one memory: a split would save nothing")
    whole = forecast_one_row(cfg, shape, hardware=hardware, strategy="ddp")
    need = format_bytes(whole.peak_bytes)
    if whole.verdict != "does_not_fit":
        saved = whole.peak_bytes - forecast_one_row(cfg, shape, hardware=hardware, strategy="zero2").peak_bytes
        saving = f"; zero2 would save {format_bytes(saved)} of {need}" if saved > 0 else ""
        return Decision("ddp", f"each GPU can hold all of it{saving}")
    if cfg.tuning.trains_single_rows:
        return Decision("ddp", "the rows of new tokens train only where each GPU has whole matrices")
    # Splits of all weights, as far as they are installed; 4-bit weights are split by torch alone.
    has_zero = cfg.tuning.mode != "qlora" and importlib.util.find_spec("deepspeed") is not None
    splits: tuple[Strategy, ...] = ("zero3", "fsdp") if has_zero else ("fsdp",)
    for strategy in splits:
        split = forecast_one_row(cfg, shape, hardware=hardware, strategy=strategy)
        if split.verdict != "does_not_fit":
            room = format_bytes(whole.budget_bytes)
            reason = f"ddp needs {need} of {room} on each GPU, split it is {format_bytes(split.peak_bytes)}"
            return Decision(strategy, reason)
    return Decision("ddp", "no split makes it fit either")
