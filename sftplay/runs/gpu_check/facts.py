"""Facts: what the driver says of the GPUs beside what torch says of them."""

from __future__ import annotations

import os
from typing import Any

from sftplay.launch.command.command import gpu_environment
from sftplay.machine.gpu import Gpu
from sftplay.machine.gpu_info import holders, label
from sftplay.machine.probe import Machine, probe
from sftplay.runs.gpu_check.check import Broken, Check, Place, a_gpu
from sftplay.units import format_bytes

MOST_HIDDEN, MOST_ADDED = 0.03, 0.01
"""Of a card's memory, what the driver may keep from torch, and what torch may see more."""


def driver_and_torch(place: Place) -> str:
    """Number, names, memory, capability, MIG and peer access agree, and this build of torch has code for each card."""
    os.environ.update(gpu_environment())  # torch then numbers the GPUs as the driver does
    import torch

    machine = probe(in_detail=True)
    place.details["machine"] = machine.as_dict()
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


def differences(gpu: Gpu, told: Any) -> list[str]:
    """Where torch's properties of a device differ from the driver's."""
    odd = []
    if (told.major, told.minor) != gpu.capability:
        odd.append(f"GPU {gpu.index}: capability {told.major}.{told.minor} by torch, {gpu.capability} by the driver")
    if not (1 - MOST_HIDDEN) * gpu.total_bytes <= told.total_memory <= (1 + MOST_ADDED) * gpu.total_bytes:
        sizes = f"{format_bytes(told.total_memory)} by torch, {format_bytes(gpu.total_bytes)} by the driver"
        odd.append(f"GPU {gpu.index}: {sizes}")
    return odd


def peer_differences(machine: Machine, can_access: Any) -> list[str]:
    """Pairs of GPUs that read each other's memory by torch and not by the driver, or the other way round."""
    odd, count = [], len(machine.gpus)
    for pair in ((a, b) for a in range(count) for b in range(a + 1, count)):
        if bool(can_access(*pair)) == (pair in machine.without_peer_access):
            odd.append(f"GPUs {pair[0]} and {pair[1]}: torch and the driver differ about peer access")
    return odd


def without_code(machine: Machine) -> list[str]:
    """GPUs that this build of torch has no code for."""
    build = machine.torch
    return [
        f"GPU {gpu.index}: torch was built for {' '.join(build.archs)} only"
        for gpu in machine.gpus
        if build and build.runs_on(gpu.capability) is False
    ]


def other_users(_place: Place) -> str:
    """Who else holds the GPUs' memory: figures of speed and memory mean little beside them. It never fails."""
    gpus = probe(in_detail=True).gpus
    held = [
        f"GPU {gpu.index}: {format_bytes(gpu.free_bytes)} of {format_bytes(gpu.total_bytes)} free, in use by "
        + (", ".join(map(label, holders(gpu))) or "nobody")
        for gpu in gpus
    ]
    return "; ".join(held)


CHECKS = (
    Check(name="facts: driver and torch agree", run=driver_and_torch),
    Check(name="facts: who else uses the GPUs", run=other_users, needs=a_gpu),
)
