"""One run on one kind of device: bytes at each phase of a step in closed form, the peak, the budget and the verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from sftplay.config.run import RunConfig
from sftplay.plan.activations import (
    FP32,
    copied_end,
    copies_of_stream,
    head_in_backward,
    head_in_forward,
    layer_bytes,
    norm_kept,
    norm_moment,
    stream_bytes,
)
from sftplay.plan.devices import OWN, find_card, name_devices
from sftplay.plan.memory_setup import OPENED, MemorySetup, gpu_chunk_tokens, trained_params, workspace_bytes
from sftplay.plan.shape import ModelShape
from sftplay.units import GIB

if TYPE_CHECKING:
    from sftplay.machine.gpu import Machine
    from sftplay.plan.fit import Fit


MASK_BYTES = 1  # an entry of the mask of booleans that transformers makes for all layers (`sdpa_mask`)


@dataclass(frozen=True, kw_only=True)
class Size:
    """One micro-batch: `rows` of `seq` tokens each, padded; `labelled` of all tokens carry a label (None: all)."""

    rows: int
    seq: int
    labelled: int | None = None
    # True when an optimizer step has several micro-batches: all but the first then run while gradients are whole.
    accumulates: bool = False

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

    buffers: float = 0.0  # held throughout a step
    # Whole weights outside the layers and of the layer at work; none are left when the optimizer steps.
    gathered: float = 0.0
    ahead: float = 0.0  # whole weights of the layer after that, fetched before they are needed


ALONE = Communication()
SHARDING = "buckets and sharding"


def standing_bytes(shape: ModelShape, setup: MemorySetup) -> StaticMemory:
    """Count weights, adapters, gradients and optimizer state of a model that one device holds alone."""
    trained = trained_params(shape, setup)
    others = shape.total_params - shape.linear_params + shape.vision_params
    return StaticMemory(
        weights=shape.linear_params * setup.linear_bytes + others * setup.weight_bytes,
        adapters=0.0 if setup.trains_all else float(trained * setup.trained_bytes),
        gradients=float(trained * setup.trained_bytes),
        optimizer=trained * setup.state_bytes,
    )


def estimate(
    shape: ModelShape,
    setup: MemorySetup,
    *,
    size: Size,
    standing: StaticMemory | None = None,
    communication: Communication = ALONE,
) -> Footprint:
    """Estimate the bytes of every phase of one optimizer step on one device, in the steady state.

    `standing` is the device's part of what is held throughout, None for all of it. The optimizer's state exists from
    the second step on, so the first step may fit where later ones do not.
    """
    standing = standing or standing_bytes(shape, setup)
    resident = {
        "weights": standing.weights,
        "adapters": standing.adapters,
        "optimizer": standing.optimizer,
        SHARDING: communication.buffers + communication.gathered,
        "workspace": float(setup.workspace_bytes),
    }
    if setup.is_masked:
        # Under checkpointing one layer's bias lives at a time.
        biases = 1 if setup.attention == "eager" or setup.checkpointing else shape.layers
        entry = MASK_BYTES + bias_bytes(setup) * biases
        resident["mask"] = float(entry * size.rows * size.seq**2)
    # The end of forward or the beginning of backward, whichever holds more.
    labelled = size.tokens if size.labelled is None else size.labelled
    head = {
        "gradients": standing.gradients if size.accumulates else 0.0,
        "activations": kept_bytes(shape, setup, size=size),
        "head": max(
            head_in_forward(shape, setup, tokens=size.tokens, labelled=labelled) + _rounded_layers(shape, setup),
            head_in_backward(shape, setup, tokens=size.tokens, labelled=labelled),
        ),
    }
    layer = _layer_phase(shape, setup, size=size, gradients=standing.gradients, communication=communication)
    step = {"gradients": standing.gradients, "optimizer step": standing.gradients if setup.is_foreach else 0.0}
    return Footprint(
        {
            "head": {**resident, **head},
            "layer": {**resident, **layer},
            "step": {**resident, "mask": 0.0, SHARDING: communication.buffers, **step},
        }
    )


def bias_bytes(setup: MemorySetup) -> int:
    """Bytes of an entry of the bias that the memory-efficient kernel makes of the mask in each layer, in its queries'
    dtype, and keeps for that layer's backward (torch, `convert_boolean_attn_mask`). transformers makes the eager one,
    in the dtype of the embeddings (`eager_mask`)."""
    return setup.weight_bytes if setup.attention == "eager" else setup.compute_bytes


def kept_bytes(shape: ModelShape, setup: MemorySetup, *, size: Size) -> float:
    """Count what all layers keep from forward to backward: their inputs, or with checkpointing off everything."""
    if setup.checkpointing:
        return float(shape.layers * size.tokens * shape.hidden * stream_bytes(shape, setup))
    kept = sum(kind.layers * layer_bytes(kind, setup, tokens=size.tokens, seq=size.seq).kept for kind in shape.kinds)
    if setup.trains_all or setup.trains_rows:
        return kept
    # Without a gradient to hand to the frozen embedding, the norms that read it keep nothing.
    first_norms = copies_of_stream(shape, setup) if shape.parallel_block else 1
    return kept - first_norms * size.tokens * norm_kept(shape, setup)


def _layer_phase(
    shape: ModelShape, setup: MemorySetup, *, size: Size, gradients: float, communication: Communication
) -> dict[str, float]:
    """Backward in the layer it enters first, or in the one it leaves last: gradients grow while activations go."""
    kept, stream = kept_bytes(shape, setup, size=size), stream_bytes(shape, setup)
    works = []
    for kind in shape.kinds:
        layer = layer_bytes(kind, setup, tokens=size.tokens, seq=size.seq)
        works.append(layer.peak if setup.checkpointing else layer.peak - layer.kept)
        if setup.checkpointing and shape.norm == "layer" and stream == FP32:
            works[-1] -= size.tokens * norm_kept(shape, setup)  # the first norm keeps the input, which is there already
    work = max(works)
    early, late, of_layer = gradients, gradients, 0.0
    if not size.accumulates:
        # The head's gradient is the first to be made and, untied, the embedding's the last.
        trained = trained_params(shape, setup)
        head = shape.head_params / trained if setup.trains_all else 0.0
        layers = (shape.total_params - shape.other_params) / trained if setup.trains_all else 1.0
        early, late = gradients * head, gradients * (head + layers * (shape.layers - 1) / shape.layers)
        of_layer = gradients * layers / shape.layers
    left = kept / shape.layers
    if setup.checkpointing and setup.holds_inputs:
        # In the last layer all inputs are there, and the gradients of the others' save the one that enters it.
        left = kept * (1 + max(0, shape.layers - 2) / shape.layers)
    last_norm = size.tokens * (norm_kept(shape, setup) + norm_moment(shape))
    embedding = float(size.tokens * shape.hidden * stream)  # the stream's gradient
    if setup.trains_all:
        # The embedding's meets the head's before both become the tied weight's. The head's is a transposed view unless
        # autocast rounded the weight; the engine adds to no view in place.
        is_rounded = setup.has_autocast and setup.weight_bytes != setup.compute_bytes
        is_view = setup.head == "standard" and not is_rounded
        matrix = shape.vocab * shape.hidden * setup.trained_bytes
        embedding += matrix * (shape.tied * (1 + is_view) + size.accumulates)
    else:
        embedding += copied_end(shape, setup)
    end = communication.buffers + communication.gathered
    start = end + communication.ahead
    moments = (
        {SHARDING: start, "gradients": early, "activations": kept, "layer": work},
        *(
            # Backward leaves a kind of layers last in its first one, when layers before that are still to come.
            {SHARDING: end, "gradients": late - kind.starts_at * of_layer, "activations": left, "layer": last}
            for kind, last in zip(shape.kinds, works, strict=True)
        ),
        {SHARDING: start, "gradients": early, "activations": kept, "layer": last_norm},
        {SHARDING: end, "gradients": gradients, "layer": embedding},
    )
    fullest = max(moments, key=lambda moment: sum(moment.values()))
    held = setup.logits_bytes * size.tokens * shape.vocab if setup.holds_scores else 0
    return {**fullest, "held scores": float(held)}


def _rounded_layers(shape: ModelShape, setup: MemorySetup) -> float:
    """16-bit copies of what trains in the layers; autocast keeps them from their first use to the end of forward."""
    # Without checkpointing they are among the activations.
    if not setup.checkpointing or not setup.has_autocast or setup.trained_bytes == setup.compute_bytes:
        return 0.0
    return float(setup.compute_bytes * (shape.linear_params if setup.trains_all else trained_params(shape, setup)))


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
    "cpu": (0.08, 112 * 2**20),
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

    From capability 8.0 on, padded rows of a plain decoder in 16 bits need no mask (`train.micro_batches`).
    """
    if not device.is_gpu:
        return replace(setup, folds_tiles=False, workspace_bytes=0)
    here = replace(setup, workspace_bytes=workspace_bytes(device.capability))
    is_half, is_plain = setup.compute_bytes == 2, shape.sliding_window is None and shape.layer_pattern == 1
    here = replace(here, chunk_tokens=gpu_chunk_tokens(shape.vocab))
    if device.capability >= (8, 0) and is_half and is_plain and setup.attention == "efficient":
        here = replace(here, attention="flash", is_masked=False, repeats_kv=False)
    return here
