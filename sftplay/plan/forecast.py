"""One run on one kind of device: every component's bytes, the peak, the device's budget and the verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol

from sftplay.config.run import RunConfig
from sftplay.plan.devices import OWN, find_card, name_devices
from sftplay.plan.memory import (
    DeviceShare,
    Footprint,
    Size,
    Strategy,
    estimate,
    find_share,
    loading_bytes,
    standing_bytes,
)
from sftplay.plan.memory_setup import OPENED, MemorySetup, gpu_chunk_tokens, workspace_bytes
from sftplay.plan.shape import ModelShape
from sftplay.units import GIB

if TYPE_CHECKING:
    from sftplay.machine.gpu import Machine
    from sftplay.plan.fit import Fit

USABLE_SHARE = 0.92
"""Share of a device's memory that a plan uses; fragmentation of the allocator and the driver take the rest."""

CONTEXT_BYTES = {(7, 0): int(0.4 * GIB), (7, 5): int(0.14 * GIB), (8, 0): int(0.45 * GIB), (9, 0): int(0.75 * GIB)}
"""A CUDA context with torch's kernels, from this compute capability on: 0.14 GiB over 79 runs on a T4 (fitcheck's
public table); 0.3 to 0.4 GiB on a V100 (pytorch #20532), 320 MB of it without torch (pytorch #28394, on a Titan V,
which has the same chip); 0.75 GiB on an H200 (docs/benchmarks.md); 0.45 GiB assumed on Ampere (not measured)."""

NCCL_BYTES = int(0.5 * GIB)  # communicators of one process group: between 0.3 and 1 GiB (assumed, not measured)

CPU_PROCESS_BYTES = 545 * 2**20
"""Resident memory of a training process without its model: Python, torch, transformers, TRL, TensorBoard and what they
make at import; 385 MiB of it are anonymous and 160 MiB touched pages of shared libraries. Measured as the peak of a
whole run of a model of 0.2 MB (`benchmarks/cpu_memory.py --only process`; Linux x86-64, glibc, the lock's versions).

Pages of the checkpoint's file are not planned: they are clean, so the kernel drops them before it refuses memory. On a
kernel that maps files in larger pieces, 300 MiB of the libraries were resident instead of 160, which it drops as well.
"""

MARGINS: dict[str, tuple[float, int]] = {
    "one": (0.06, int(1.6 * GIB)),
    "several": (0.12, int(2.5 * GIB)),
    "probed": (0.03, GIB // 2),
    "cpu": (0.08, 96 * 2**20),
}
"""Share of the estimate and bytes to keep free on top of it: one GPU, sharded over several, measured by a probe."""


@dataclass(frozen=True)
class Device:
    """What each process of a run gets, and how many of the kind there are on this machine."""

    name: str
    total_bytes: int
    free_bytes: int
    is_gpu: bool
    capability: tuple[int, int] = (0, 0)
    count: int = 1
    tflops: float | None = None
    cores: int = 1

    @property
    def has_bf16(self) -> bool:
        return not self.is_gpu or self.capability >= (8, 0)

    @property
    def budget_bytes(self) -> int:
        """What a plan may fill: a share of all, and never more than is free now."""
        return int(min(USABLE_SHARE * self.total_bytes, self.free_bytes))


def find_device(machine: Machine, local_processes: int = 1) -> Device:
    """Find the smallest of this machine's GPUs, as every rank must fit; without one, a process's part of the memory."""
    if not machine.gpus:
        total, free = machine.ram_bytes // local_processes, machine.ram_available // local_processes
        return Device("CPU", total, free, False, count=local_processes, cores=machine.cores)
    used = machine.gpus[:local_processes]
    smallest = min(used, key=lambda gpu: min(USABLE_SHARE * gpu.total_bytes, gpu.plannable_bytes))
    card = find_card(smallest.name)
    capability = min(gpu.capability for gpu in used)
    size, free, tflops = smallest.total_bytes, smallest.plannable_bytes, card.tflops if card else None
    return Device(smallest.name, size, free, True, capability, len(machine.gpus), tflops)


def runtime_bytes(device: Device, world_size: int) -> int:
    """Return the memory of the process without what it allocates for the model."""
    if not device.is_gpu:
        return CPU_PROCESS_BYTES
    context = CONTEXT_BYTES[max(first for first in CONTEXT_BYTES if first <= max(device.capability, (7, 0)))]
    return context + (NCCL_BYTES if world_size > 1 else 0)


Verdict = Literal["fits", "tight", "does_not_fit"]

RUNTIME, MARGIN = "runtime", "margin"

LOAD = "load"  # the phase in which a model is opened whole and then split over the processes

UNMODELLED_SHARE = 0.25  # added to the margin for a model with parts that no plan accounts for

UNTRACED_SHARE = 0.12
"""Added to the margin for a family whose closed form nobody has held against a trace; Falcon's was 11 % too low."""

TRACED = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "phi", "gpt_neox", "gpt2", "olmo2",
    "granite", "smollm3", "hrm", "ministral3", "qwen3_5_text", "qwen3_5_moe_text", "gemma4_text", "glm4_moe", "gpt_oss",
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
    copies: int = 1  # of the model, each split over its part of the processes (hsdp)
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
        kind = "probed" if setting.fit else "one" if setting.strategy in ("single", "ddp") else "several"
        share, fixed = MARGINS[kind if setting.device.is_gpu else "cpu"]
        margin = int(share * allocated + fixed)  # kept free because the estimate may be too low
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
    holders = setting.world_size // setting.copies
    share = find_share(shape, setup, standing=standing, strategy=setting.strategy, world_size=holders)
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


@dataclass(frozen=True, kw_only=True)
class RowLengths:
    """Lengths of the rows to train on, in tokens, after the long ones are cut."""

    longest: int  # of pairs: the prompt with one answer
    mean: float
    count: int
    joined: int | None = None  # of pairs: the prompt with both answers, at most
    labels: int | None = None  # of pairs: the labels of both answers, at most


def planned_tokens(cfg: RunConfig, lengths: RowLengths | None) -> int:
    """Tokens of a row of a micro-batch at its fullest.

    A packed row, a micro-batch that is formed by tokens, and a block of documents is filled up to its limit whatever
    the rows are. `cfg.train.packing` is decided; where it is not, rows count as packed.
    """
    limit = cfg.row_tokens
    if lengths is None or cfg.learns_documents or cfg.train.packing is not False or cfg.train.batching == "tokens":
        return limit
    return min(limit, lengths.longest)


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
