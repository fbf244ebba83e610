"""One run on one kind of device: every component's bytes, the peak, the budget and the verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol

from sftplay.plan.memory.budget import Device, margin_bytes, runtime_bytes
from sftplay.plan.memory.memory_setup import OPENED, MemorySetup, gpu_chunk_tokens, workspace_bytes
from sftplay.plan.memory.row_lengths import RowLengths
from sftplay.plan.memory.sharding import DeviceShare, Strategy, find_share, loading_bytes
from sftplay.plan.memory.step import Footprint, Size, estimate, standing_bytes
from sftplay.plan.shape.model_shape import ModelShape

if TYPE_CHECKING:
    from sftplay.plan.memory.probe_fit import Fit

Verdict = Literal["fits", "tight", "does_not_fit"]

RUNTIME, MARGIN = "runtime", "margin"

LOAD = "load"  # the phase in which a model is opened whole and then split over the processes


UNMODELLED_SHARE = 0.25  # added to the margin for a model with parts that no plan accounts for

UNTRACED_SHARE = 0.12
"""Added to the margin for a family whose closed form nobody has held against a trace; Falcon's was 11 % too low."""

TRACED = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "phi", "gpt_neox", "gpt2", "olmo2",
    "granite", "smollm3", "hrm",
)  # fmt: skip
"""Families of tests/plan/test_memory_oracle.py, and the puzzles of tests/plan/test_puzzle_memory.py."""


class TaskMemory(Protocol):
    """The memory of a task that does more in a step than learn from plain rows."""

    @property
    def learners(self) -> int:
        """Models that train."""

    @property
    def labels(self) -> Mapping[str, str]:
        """Component or phase of the task -> what `make plan` calls it."""

    def forecast(self, setting: Setting, size: Size, *, sampled: int, share: DeviceShare) -> Forecast:
        """Forecast a step of the task in `setting`, where `share` is what a device holds of the model."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a forecast is about: a model, the code that runs, and where."""

    shape: ModelShape
    execution: MemorySetup
    device: Device
    strategy: Strategy = "single"
    world_size: int = 1
    # What a probe measured of this model and code on this device; None leaves the estimate as it is.
    fit: Fit | None = None
    task: TaskMemory | None = None  # of a task with a step of its own; None for a step of plain rows
    # True where the untrained model answers before it is split (eval.before), for which it lies on the device.
    measures_first: bool = False


@dataclass(frozen=True)
class Forecast:
    """Bytes on one device for one micro-batch size."""

    setting: Setting
    size: Size
    footprint: Footprint
    host_bytes: int
    sampled: int = 0  # completions that a process samples at a time; 0 where it samples none
    # Of a run whose parts lie on several devices; `footprint` is that of the fullest GPU.
    by_device: Mapping[str, Footprint] = field(default_factory=dict)
    # True where the model would not fit the device before it is split, so that it is opened in the host's memory.
    opens_on_host: bool = False

    @property
    def allocated_bytes(self) -> int:
        """Peak of torch's allocator."""
        return self.footprint.peak_bytes

    @property
    def components(self) -> dict[str, int]:
        """Component -> bytes at the peak; they add up to `peak_bytes`."""
        setting = self.setting
        allocated = self.allocated_bytes
        runtime = runtime_bytes(setting.device, setting.world_size)
        if setting.fit and setting.fit.context_bytes is not None:
            runtime += setting.fit.context_bytes - runtime_bytes(setting.device, 1)
        is_probed = setting.fit is not None
        margin = margin_bytes(allocated, setting.device, strategy=setting.strategy, is_probed=is_probed)
        # The closed form does not know everything of some models.
        if setting.shape.unmodelled:
            margin += int(UNMODELLED_SHARE * allocated)
        elif setting.shape.family not in TRACED:
            margin += int(UNTRACED_SHARE * allocated)
        return {**self.footprint.components, RUNTIME: runtime, MARGIN: margin}

    @property
    def peak_bytes(self) -> int:
        return sum(self.components.values())

    @property
    def device_peaks(self) -> dict[str, int]:
        """Device -> its peak with process and margin; without what lies on the host of a machine with GPUs."""
        from sftplay.plan.devices.layout import OWN, name_devices

        footprints = self.by_device or {OWN: self.footprint}
        peaks = {name: replace(self, footprint=footprint).peak_bytes for name, footprint in footprints.items()}
        return name_devices(peaks, is_gpu=self.setting.device.is_gpu)

    @property
    def peak_phase(self) -> str:
        return self.footprint.peak_phase

    @property
    def budget_bytes(self) -> int:
        return self.setting.device.budget_bytes

    @property
    def verdict(self) -> Verdict:
        """tight: it fits by the estimate, but not with the margin that the estimate needs."""
        if self.peak_bytes <= self.budget_bytes:
            return "fits"
        return "tight" if self.peak_bytes - self.components[MARGIN] <= self.budget_bytes else "does_not_fit"

    def as_dict(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "budget_bytes": self.budget_bytes,
            "peak_bytes": self.peak_bytes,
            "allocated_bytes": self.allocated_bytes,
            "peak_phase": self.peak_phase,
            "components": self.components,
            "phases": {name: round(sum(parts.values())) for name, parts in self.footprint.phases.items()},
            "host_bytes": self.host_bytes,
            **({OPENED: "host" if self.opens_on_host else "device"} if LOAD in self.footprint.phases else {}),
            **({"devices": {name: used.peak_bytes for name, used in self.by_device.items()}} if self.by_device else {}),
        }


def forecast(setting: Setting, size: Size, *, sampled: int = 1) -> Forecast:
    """Return the bytes of `size` in `setting`, in the steady state; `sampled` completions are sampled at a time."""
    shape, setup = setting.shape, setting.execution
    standing = standing_bytes(shape, setup)
    share = find_share(shape, setup, standing=standing, strategy=setting.strategy, world_size=setting.world_size)
    if setting.task is not None:
        return setting.task.forecast(setting, size, sampled=sampled, share=share)
    footprint = estimate(shape, setup, size=size, standing=share.standing, communication=share.communication)
    if (fit := setting.fit) is not None:
        # Every phase is scaled by the probe's measurement over the estimate for the probed step. The probe ran one
        # process; the share that several processes add is scaled with the rest.
        probed = Size(rows=size.rows, seq=size.seq, accumulates=fit.accumulates)
        estimated = estimate(shape, setup, size=probed).phases
        phases = {}
        for name, parts in footprint.phases.items():
            factor = fit.lines[name].at(size.tokens) / sum(estimated[name].values()) if name in fit.lines else 1.0
            phases[name] = {part: bytes_ * factor for part, bytes_ in parts.items()}
        footprint = Footprint(phases)
    return with_loading(Forecast(setting, size, footprint, round(share.host)), share=share)


def with_loading(seen: Forecast, *, share: DeviceShare) -> Forecast:
    """Return the forecast with the phase before the first step, in which processes split the weights.

    FSDP can split a model that lies in the host's memory. It does so where the whole model would not fit the device.
    """
    setting, setup, phases = seen.setting, seen.setting.execution, seen.footprint.phases
    standing = standing_bytes(setting.shape, setup)
    load = partial(loading_bytes, setting.shape, setup, standing=standing, share=share, strategy=setting.strategy)
    parts = load()
    if not parts or not setting.device.is_gpu:
        return seen
    loading = replace(seen, footprint=Footprint({LOAD: parts}))
    can_wait = setting.strategy.startswith("fsdp") and not setup.four_bit and not setting.measures_first
    if loading.verdict == "fits" or not can_wait:
        return replace(seen, footprint=Footprint({LOAD: parts, **phases}))
    parts = load(is_on_host=True)
    # A base that is frozen stays in the pages of its files, which processes share.
    opened = standing.weights if setup.trains_all else standing.adapters
    host, footprint = max(seen.host_bytes, round(opened)), Footprint({LOAD: parts, **phases})
    return replace(seen, footprint=footprint, host_bytes=host, opens_on_host=True)


@dataclass(frozen=True)
class Hardware:
    """The place of a run: the kind of device, how many processes, and what is known of its rows."""

    device: Device
    world_size: int
    lengths: RowLengths | None = None

    @property
    def gpus(self) -> int:
        """Those that a process may see."""
        return self.device.count if self.device.is_gpu else 0


def on_device(setup: MemorySetup, shape: ModelShape, *, device: Device) -> MemorySetup:
    """Return the setup as it runs on that device.

    From capability 8.0 on, padded rows of a plain decoder in 16 bits need no mask (`train.isolation`).
    """
    here = replace(setup, workspace_bytes=workspace_bytes(device.capability))
    if not device.is_gpu:
        return replace(here, folds_tiles=False)
    is_half, is_plain = setup.compute_bytes == 2, shape.sliding_window is None and shape.layer_pattern == 1
    here = replace(here, chunk_tokens=gpu_chunk_tokens(shape.vocab))
    if device.capability >= (8, 0) and is_half and is_plain and setup.attention == "efficient":
        here = replace(here, attention="flash", is_masked=False, repeats_kv=False)
    return here
