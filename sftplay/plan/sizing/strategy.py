"""How several processes share a model: plain data parallelism where each can hold all of it, else a split."""

from __future__ import annotations

from importlib.util import find_spec

from sftplay.config.schema.run import RunConfig
from sftplay.plan.memory.budget import Device
from sftplay.plan.memory.execution import execution_of
from sftplay.plan.memory.forecast import Forecast, Setting, forecast
from sftplay.plan.memory.sharding import Strategy
from sftplay.plan.memory.step import Size
from sftplay.plan.shape.model_shape import ModelShape
from sftplay.plan.sizing.decisions import Decision
from sftplay.units import format_bytes

KEY = "cluster.strategy"


def planned_strategy(cfg: RunConfig, world_size: int) -> Strategy:
    """What the memory plan calls the strategy of a config in which it is decided."""
    if world_size == 1:
        return "single"
    # Within a node hsdp splits as fsdp does; over more nodes it copies, so this is the least it takes.
    kinds: dict[str, Strategy] = {"zero1": "zero1", "zero2": "zero2", "zero3": "zero3", "fsdp": "fsdp", "hsdp": "fsdp"}
    return kinds.get(cfg.cluster.strategy, "ddp")


def choose_strategy(cfg: RunConfig, shape: ModelShape | None, device: Device, world_size: int) -> Decision:
    """The first of ddp, zero3 and fsdp that holds one row at a time; ddp where none does or nothing can be said."""
    if world_size == 1:
        return Decision(KEY, "ddp", "one process holds everything")
    if shape is None:
        return Decision(KEY, "ddp", "the model's shape is not known here, so nothing says that it must be split")
    if not device.is_gpu:
        return Decision(KEY, "ddp", "processes on CPUs share one memory: a split would save nothing")
    whole = _one_row(cfg, shape, device, ("ddp", world_size))
    if whole.verdict != "does_not_fit":
        return Decision(KEY, "ddp", f"each GPU can hold all of it{_saving(cfg, shape, device, whole)}")
    for strategy in _splits(cfg):
        split = _one_row(cfg, shape, device, (strategy, world_size))
        if split.verdict != "does_not_fit":
            need, room = format_bytes(whole.peak_bytes), format_bytes(whole.budget_bytes)
            return Decision(
                KEY, strategy, f"ddp needs {need} of {room} on each GPU, split it is {format_bytes(split.peak_bytes)}"
            )
    return Decision(KEY, "ddp", "no split makes it fit either")


def _splits(cfg: RunConfig) -> tuple[Strategy, ...]:
    """Splits of all weights, as far as they are installed; 4-bit weights are split by torch alone."""
    if cfg.tuning.mode == "qlora" or find_spec("deepspeed") is None:
        return ("fsdp",)
    return ("zero3", "fsdp")


def _saving(cfg: RunConfig, shape: ModelShape, device: Device, whole: Forecast) -> str:
    split = _one_row(cfg, shape, device, ("zero2", whole.setting.world_size))
    saved = whole.peak_bytes - split.peak_bytes
    return f"; zero2 would save {format_bytes(saved)} of {format_bytes(whole.peak_bytes)}" if saved > 0 else ""


def _one_row(cfg: RunConfig, shape: ModelShape, device: Device, how: tuple[Strategy, int]) -> Forecast:
    strategy, world_size = how
    setting = Setting(shape=shape, path=execution_of(cfg), device=device, strategy=strategy, world_size=world_size)
    accumulates = cfg.train.effective_batch_size > world_size
    return forecast(setting, Size(rows=1, seq=cfg.model.max_seq_len, accumulates=accumulates))
