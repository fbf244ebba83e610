"""Compares facts about the machine with what a run needs, and lists what would go wrong, each with its remedy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sftplay.machine.doctor import system
from sftplay.machine.doctor.check_result import CheckResult
from sftplay.machine.doctor.gpu import check_gpus
from sftplay.machine.doctor.hub import check_hub
from sftplay.machine.doctor.install import check_compiler, check_libraries, check_torch
from sftplay.machine.libraries import ask_torch
from sftplay.machine.probe import Machine


@dataclass(frozen=True, kw_only=True)
class RunNeeds:
    """What a run needs of the machine, as far as it is known."""

    output: Path = Path("outputs")
    hub_model: str | None = None
    """Name of the model on the hub; None for a folder, a builtin model, or no run in mind."""
    checkpoint_bytes: int | None = None
    checkpoints_kept: int = 2
    wants_4bit: bool = False


def diagnose(machine: Machine, needs: RunNeeds, *, is_fast: bool = False) -> list[CheckResult]:
    """All findings about a machine probed in detail. With `is_fast` neither torch nor the network is asked."""
    results = [*check_gpus(machine), *check_libraries(machine), *check_compiler(machine)]
    if needs.wants_4bit and "bitsandbytes" not in machine.libraries:
        results.append(CheckResult("stop", "versions", "tuning.mode qlora needs bitsandbytes", "make install"))
    if not is_fast and "torch" in machine.libraries:
        results += check_torch(ask_torch(), machine)
    results += system.check_memory(machine)
    results += system.check_disk(needs.output, needs.checkpoint_bytes, kept=needs.checkpoints_kept)
    results += [*system.check_shared_memory(machine), *system.check_ports(), *system.check_limits()]
    results += [*system.check_environment(machine), *system.check_builds()]
    return results + check_hub(needs.hub_model, is_fast=is_fast)
