"""One check of `make gpu-check`: its name, what it needs, and how it says that a promise does not hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sftplay.machine.probe import Machine

NEEDS_GPU = "needs a CUDA GPU"


class NotPossible(Exception):
    """This machine cannot show it. The text says why."""


class Broken(Exception):
    """The promise does not hold here. The text says what was found."""


@dataclass(frozen=True)
class CheckContext:
    """Where a check works."""

    machine: Machine
    folder: Path
    """The check's own, empty at its start and removed behind it."""

    shared: Path
    """That of all checks, for what several of them need."""

    details: dict[str, Any] = field(default_factory=dict)
    """Figures for the JSON file that do not fit into a line of the table."""

    @property
    def has_gpu(self) -> bool:
        return bool(self.machine.gpus)

    @property
    def bound(self) -> float:
        """How far two runs of the same steps may be apart, as a share: on a CPU they are equal bit for bit."""
        return 1e-3 if self.has_gpu else 0.0


@dataclass(frozen=True, kw_only=True)
class Check:
    """A row of the table. `run` returns its figure, and raises `Broken`, `NotPossible` or any other error."""

    name: str
    run: Callable[[CheckContext], str]
    needs: Callable[[Machine], str] = lambda _: ""
    """Why this machine cannot show it; empty where it can. It is asked before a process is started."""

    limit_s: float = 600.0
    """After that the check counts as hanging, and its processes are killed. A busy machine needs minutes for a row that
    takes seconds on an idle one."""

    is_long: bool = False
    """True for what FAST=1 leaves out."""


def a_gpu(machine: Machine) -> str:
    """`needs` of a check that cannot do without a GPU."""
    return "" if machine.gpus else NEEDS_GPU


def several_gpus(machine: Machine) -> str:
    """`needs` of a check that takes at least two GPUs."""
    return "" if len(machine.gpus) > 1 else "needs two CUDA GPUs"
