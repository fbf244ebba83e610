"""Decide how a run is placed: the strategy and the devices of roles."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from sftplay.config.rules.score import broken_shard_rules
from sftplay.config.schema.run import RunConfig
from sftplay.plan.devices.layout import DEVICES, PLACEMENT, layout_of
from sftplay.plan.memory.forecast import Forecast, Place, forecast_one_row
from sftplay.plan.memory.sharding import Strategy
from sftplay.plan.shape.model_shape import ModelShape
from sftplay.plan.sizing.decisions import Decision, Decisions
from sftplay.units import format_bytes

STRATEGY = "cluster.strategy"


def planned_strategy(cfg: RunConfig, world_size: int) -> Strategy:
    """What the memory plan calls the strategy of a config in which it is decided."""
    if world_size == 1:
        return "single"
    # Within a node hsdp splits as fsdp does; over more nodes it copies, so this is the least it takes.
    kinds: dict[str, Strategy] = {"zero1": "zero1", "zero2": "zero2", "zero3": "zero3", "fsdp": "fsdp", "hsdp": "fsdp"}
    return kinds.get(cfg.cluster.strategy, "ddp")


def choose_strategy(cfg: RunConfig, shape: ModelShape | None, *, place: Place) -> Decision:
    """The first of ddp, zero3 and fsdp that holds one row at a time; ddp where none does or nothing can be said."""
    if place.world_size == 1:
        return Decision("ddp", "one process holds everything")
    if cfg.task_mode == "score":
        if cfg.score.placement == "sharded":
            return Decision("fsdp", "score.placement sharded splits both models by torch itself")
        return Decision("ddp", f"score.placement {cfg.score.placement} has both models whole")
    if shape is None:
        return Decision("ddp", "the model's shape is not known here, so nothing says that it must be split")
    if not place.device.is_gpu:
        return Decision("ddp", "processes on CPUs share one memory: a split would save nothing")
    whole = forecast_one_row(cfg, shape, place=place, strategy="ddp")
    need = format_bytes(whole.peak_bytes)
    if whole.verdict != "does_not_fit":
        saved = whole.peak_bytes - forecast_one_row(cfg, shape, place=place, strategy="zero2").peak_bytes
        saving = f"; zero2 would save {format_bytes(saved)} of {need}" if saved > 0 else ""
        return Decision("ddp", f"each GPU can hold all of it{saving}")
    if cfg.tuning.trains_single_rows:
        return Decision("ddp", "the rows of new tokens train only where each GPU has whole matrices")
    for strategy in _splits(cfg):
        split = forecast_one_row(cfg, shape, place=place, strategy=strategy)
        if split.verdict != "does_not_fit":
            room = format_bytes(whole.budget_bytes)
            reason = f"ddp needs {need} of {room} on each GPU, split it is {format_bytes(split.peak_bytes)}"
            return Decision(strategy, reason)
    return Decision("ddp", "no split makes it fit either")


def _splits(cfg: RunConfig) -> tuple[Strategy, ...]:
    """Splits of all weights, as far as they are installed; 4-bit weights are split by torch alone."""
    if cfg.tuning.mode == "qlora" or find_spec("deepspeed") is None:
        return ("fsdp",)
    return ("zero3", "fsdp")


REF = f"{DEVICES}.ref"


@dataclass(frozen=True)
class Candidate:
    """Values of keys that make a layout."""

    placement: str
    ref_on_cpu: bool = False

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.placement}, reference on the CPU" if self.ref_on_cpu else self.placement

    @property
    def values(self) -> dict[str, Any]:
        """By config key."""
        split = {STRATEGY: "fsdp"} if self.placement == "sharded" else {}
        return {PLACEMENT: self.placement, **({REF: "cpu"} if self.ref_on_cpu else {}), **split}


def candidates(cfg: RunConfig, place: Place) -> list[Candidate]:
    """Layouts that these devices and this number of processes allow, the cheapest first."""
    names, is_one = ["shared"], place.world_size == 1
    if is_one and place.gpus >= 2:
        names.append("roles")
    if is_one and place.gpus >= 4:
        names.append("roles4")
    wanted = "sharded" if cfg.cluster.strategy == "fsdp" else cfg.score.placement
    if not is_one and can_split(cfg):
        names.append("sharded")
    names = [wanted] if wanted != "auto" else names
    if wanted == "auto" and cfg.score.devices.guide != "auto":
        names = [name for name in names if name != "shared"] or ["roles"]
    # Switched off, an adapter leaves the reference: there is none that could lie elsewhere.
    moves_ref = cfg.tuning.mode == "full" and cfg.score.devices.ref == "auto" and place.device.is_gpu
    found = []
    for name in names:
        found.append(Candidate(name))
        if moves_ref and name in ("shared", "roles"):
            found.append(Candidate(name, ref_on_cpu=True))
    return found


def can_split(cfg: RunConfig) -> bool:
    """Whether the config's models could be in shards."""
    tried = cfg.with_values({PLACEMENT: "sharded"}, "placement")
    return not any(broken_shard_rules(tried))


def choose_placement(cfg: RunConfig, shape: ModelShape | None, *, place: Place) -> Decisions:
    """Placement and the reference's device, where they are open; nothing for another task.

    Raises:
        ConfigError: devices contradict the placement or the number of processes.
        MachineError: the machine lacks a GPU that is named.
    """
    if cfg.task_mode != "score":
        return {}
    open_ = candidates(cfg, place)
    for each in open_[:1]:
        layout_of(cfg, placement=each.placement, gpus=place.gpus, processes=place.world_size)  # type: ignore[arg-type]
    if shape is None:
        why = "the model's shape is not known here, so nothing says that it must be separated"
        return {PLACEMENT: Decision(open_[0].placement, why)}
    seen = {each: look(cfg, shape, place=place, candidate=each) for each in open_}
    chosen = next((each for each, look_ in seen.items() if look_.verdict != "does_not_fit"), None)
    if chosen is None:
        chosen = min(seen, key=lambda each: seen[each].peak_bytes)
        why = f"no layout fits; this one comes nearest, with {_filled(seen[chosen])}"
    else:
        passed = [f"{each.name} takes {_filled(seen[each])}" for each in open_[: open_.index(chosen)]]
        why = "; ".join([f"{_filled(seen[chosen])} on the fullest device", *passed])
    return {key: Decision(value, why) for key, value in chosen.values.items()}


def look(cfg: RunConfig, shape: ModelShape, *, place: Place, candidate: Candidate) -> Forecast:
    """The forecast of a layout with one row at a time."""
    tried = cfg.with_values(candidate.values, "placement")
    return forecast_one_row(tried, shape, place=place, strategy=planned_strategy(tried, place.world_size))


def _filled(seen: Forecast) -> str:
    return f"{format_bytes(seen.peak_bytes)} of {format_bytes(seen.budget_bytes)}"
