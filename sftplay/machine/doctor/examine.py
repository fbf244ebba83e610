"""Facts and a run's wishes become findings, each with its remedy: what would go wrong before it does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sftplay.machine.doctor.finding import Finding
from sftplay.machine.doctor.gpu import look_at_gpus
from sftplay.machine.doctor.hub import look_at_hub
from sftplay.machine.doctor.install import look_at_libraries, look_at_torch
from sftplay.machine.doctor.system import (
    look_at_builds,
    look_at_disk,
    look_at_environment,
    look_at_limits,
    look_at_memory,
    look_at_ports,
    look_at_shared_memory,
)
from sftplay.machine.probe import Machine
from sftplay.machine.torch_build import ask_torch


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What a run needs of the machine, as far as it is known."""

    output: Path = Path("outputs")
    hub_model: str | None = None
    """Name of the model on the hub; None for a folder, a builtin model, or no run in mind."""
    checkpoint_bytes: int | None = None
    checkpoints_kept: int = 2
    wants_4bit: bool = False


def diagnose(machine: Machine, wishes: Wishes, *, is_fast: bool = False) -> list[Finding]:
    """All findings, the GPU's first. `is_fast` asks neither torch, which takes seconds, nor the network.

    `machine` must have been probed in detail.
    """
    found = [*look_at_gpus(machine), *look_at_libraries(machine)]
    if wishes.wants_4bit and "bitsandbytes" not in machine.libraries:
        found.append(Finding("stop", "versions", "tuning.mode qlora needs bitsandbytes", "make install"))
    if not is_fast and "torch" in machine.libraries:
        found += look_at_torch(ask_torch(), machine)
    found += look_at_memory(machine)
    found += look_at_disk(wishes.output, wishes.checkpoint_bytes, kept=wishes.checkpoints_kept)
    found += look_at_shared_memory(machine)
    found += look_at_ports()
    found += look_at_limits()
    found += look_at_environment(machine)
    found += look_at_builds()
    return found + look_at_hub(wishes.hub_model, is_fast=is_fast)
