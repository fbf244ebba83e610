"""Facts: what the driver and what torch say of the GPUs."""

from __future__ import annotations

import os
from itertools import combinations
from typing import Any

from sftplay.launch.command import gpu_environment
from sftplay.machine.gpu import Gpu
from sftplay.machine.gpu_info import holders, label
from sftplay.machine.probe import Machine, probe
from sftplay.runs.gpu_check.check import Broken, Check, CheckContext, a_gpu
from sftplay.units import format_bytes


def driver_and_torch(context: CheckContext) -> str:
    """Number, names, memory, capability, MIG and peer access agree, and this build of torch has code for each card."""
    os.environ.update(gpu_environment())  # torch then numbers the GPUs as the driver does
    import torch

    machine = probe(in_detail=True)
    context.details["machine"] = machine.as_dict()
    if not machine.gpus:
        if torch.cuda.is_available():
            raise Broken(f"torch sees {torch.cuda.device_count()} GPUs, the driver none: {machine.gpu_reason}")
        return f"no GPU, says torch {torch.__version__} too: {machine.gpu_reason}"
    if torch.cuda.device_count() != len(machine.gpus):
        raise Broken(f"torch sees {torch.cuda.device_count()} GPUs, the driver {len(machine.gpus)}")
    found = [odd for gpu in machine.gpus for odd in differences(gpu, torch.cuda.get_device_properties(gpu.index))]
    found += peer_differences(machine, torch.cuda.can_device_access_peer)
    found += without_code(machine)
    if found:
        raise Broken("; ".join(found))
    kinds = ", ".join(
        f"{gpu.name}{' (MIG)' if gpu.is_mig else ''} {format_bytes(gpu.total_bytes)}, capability "
        f"{gpu.capability[0]}.{gpu.capability[1]}"
        for gpu in machine.gpus
    )
    return f"{kinds}; torch {torch.__version__} says the same"


def differences(gpu: Gpu, by_torch: Any) -> list[str]:
    """Return where torch's properties of a device differ from the driver's."""
    odd, capability = [], (by_torch.major, by_torch.minor)
    if capability != gpu.capability:
        by_name = f"capability {by_torch.major}.{by_torch.minor} by torch, {gpu.capability} by the driver"
        odd.append(f"GPU {gpu.index}: {by_name}")
    # The driver may keep 3 % of a card's memory from torch, and torch may see 1 % more.
    if not 0.97 * gpu.total_bytes <= by_torch.total_memory <= 1.01 * gpu.total_bytes:
        sizes = f"{format_bytes(by_torch.total_memory)} by torch, {format_bytes(gpu.total_bytes)} by the driver"
        odd.append(f"GPU {gpu.index}: {sizes}")
    return odd


def peer_differences(machine: Machine, can_access: Any) -> list[str]:
    """Return pairs of GPUs that read each other's memory by torch and not by the driver, or the other way round."""
    return [
        f"GPUs {a} and {b}: torch and the driver differ about peer access"
        for a, b in combinations(range(len(machine.gpus)), 2)
        if bool(can_access(a, b)) == ((a, b) in machine.without_peer_access)
    ]


def without_code(machine: Machine) -> list[str]:
    """Return the GPUs that this build of torch has no code for."""
    build = machine.torch
    return [
        f"GPU {gpu.index}: torch was built for {' '.join(build.archs)} only"
        for gpu in machine.gpus
        if build and build.runs_on(gpu.capability) is False
    ]


def other_users(_context: CheckContext) -> str:
    """Who else holds the GPUs' memory: figures of speed and memory mean little then. It never fails."""
    return "; ".join(
        f"GPU {gpu.index}: {format_bytes(gpu.free_bytes)} of {format_bytes(gpu.total_bytes)} free, in use by "
        + (", ".join(map(label, holders(gpu))) or "nobody")
        for gpu in probe(in_detail=True).gpus
    )


CHECKS = (
    Check(name="facts: driver and torch agree", run=driver_and_torch),
    Check(name="facts: who else uses the GPUs", run=other_users, needs=a_gpu),
)
