"""What a device offers a run, what the process takes outside torch's allocator, and how far an estimate is trusted."""

from __future__ import annotations

from dataclasses import dataclass

from sftplay.machine.probe import Machine
from sftplay.plan.devices.cards import find_card
from sftplay.plan.memory.sharding import Strategy
from sftplay.units import GIB

USABLE_SHARE = 0.92
"""Share of a device's memory that a plan uses; fragmentation of the allocator and the driver take the rest."""

CONTEXT_BYTES = {(7, 0): int(0.4 * GIB), (7, 5): int(0.14 * GIB), (8, 0): int(0.45 * GIB), (9, 0): int(0.55 * GIB)}
"""A CUDA context with torch's kernels, from this compute capability on: 0.14 GiB over 79 runs on a T4 (fitcheck's
public table); 0.3 to 0.4 GiB on a V100 (pytorch #20532), 320 MB of it without torch (pytorch #28394, on a Titan V,
which has the same chip); 0.3 to 0.6 GiB assumed on later cards (not measured)."""

NCCL_BYTES = int(0.5 * GIB)  # communicators of one process group: between 0.3 and 1 GiB (assumed, not measured)

CPU_PROCESS_BYTES = 545 * 2**20
"""Resident memory of a training process without its model: Python, torch, transformers, TRL, TensorBoard and what they
make at import; 385 MiB of it are anonymous and 160 MiB touched pages of shared libraries. Measured as the peak of a
whole run of a model of 0.2 MB (`benchmarks/cpu_memory.py --only process`; Linux x86-64, glibc, the lock's versions).

Pages of the checkpoint's file are not planned: they are clean, so the kernel drops them before it refuses memory.
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


def margin_bytes(allocated: float, device: Device, *, strategy: Strategy, is_probed: bool = False) -> int:
    """Return the bytes kept free because the estimate may be too low."""
    kind = "probed" if is_probed else "one" if strategy in ("single", "ddp") else "several"
    share, fixed = MARGINS["cpu" if not device.is_gpu else kind]
    return int(share * allocated + fixed)
