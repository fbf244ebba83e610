"""Who holds which memory now: processes on each GPU, and the runs of this kit with what was planned for them.

It reads files of the runs and of the kernel, and sends nothing to a run.
"""

from __future__ import annotations

import os
import pwd
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sftplay.atomic import read_object, read_tail
from sftplay.machine.gpu import resident_bytes
from sftplay.machine.gpu_info import headline, holders, label
from sftplay.machine.probe import Machine
from sftplay.units import format_bytes


@dataclass(frozen=True)
class RankMemory:
    """One process of a run. None: not known yet."""

    rank: int
    pid: int
    gpu: int | None
    """Number of its GPU; None on a CPU, or when the driver does not show the pids of this container."""
    held_bytes: int | None
    """Memory that it holds now: on a GPU the driver says it, on a CPU the kernel."""
    allocated_bytes: int | None
    reserved_bytes: int | None
    peak_bytes: int | None
    headroom_bytes: int | None
    """What it may use, less the most that it has needed."""


@dataclass(frozen=True)
class RunMemory:
    """A run whose status.json says `running`."""

    name: str
    step: int
    is_alive: bool
    """False when its processes have ended without an exit code."""
    planned_bytes: int | None
    budget_bytes: int | None
    ranks: tuple[RankMemory, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_runs(output: Path, machine: Machine) -> list[RunMemory]:
    """The runs below `output` whose status.json says `running`, by name."""
    runs = []
    for folder in sorted(path.parent for path in output.glob("*/status.json") if not path.parent.is_symlink()):
        status, plan = read_object(folder / "status.json"), read_object(folder / "plan.json")
        if status.get("state") != "running":
            continue
        metrics: dict[str, Any] = {}
        with suppress(OSError):
            metrics = next(reversed(read_tail(folder / "metrics.jsonl")), {})
        pids = [rank["pid"] for rank in status.get("ranks") or []] or [status["pid"]] * bool(status.get("pid"))
        budget = plan.get("budget_bytes")
        ranks = tuple(_read_rank(n, pid, metrics=metrics, budget=budget, machine=machine) for n, pid in enumerate(pids))
        alive = not pids or any(resident_bytes(pid) for pid in pids)
        runs.append(RunMemory(folder.name, status.get("step") or 0, alive, plan.get("peak_bytes"), budget, ranks))
    return runs


def describe_gpus(machine: Machine) -> list[str]:
    """Each GPU with the processes that hold its memory, largest first."""
    lines = []
    for gpu in machine.gpus:
        lines.append(headline(gpu))
        for process in holders(gpu):
            owner = find_owner(process.pid) if process.pid else ""
            size = "?" if process.used_bytes is None else format_bytes(process.used_bytes)
            lines.append(f"  {size:>10}  {label(process)}{owner and f' of {owner}'}")
        if not holders(gpu):
            lines.append("  nobody holds any")
    return lines


def describe_run(run: RunMemory) -> list[str]:
    """What was planned for a run, and what each of its processes holds."""
    if not run.is_alive:
        return [f"run {run.name}: was running at step {run.step}, but its process has gone; `make resume` goes on"]
    plan = f"{_size(run.planned_bytes)} of {_size(run.budget_bytes)}"
    lines = [f"run {run.name}: running, step {run.step}; planned {plan}"]
    for rank in run.ranks:
        place = f"GPU {rank.gpu}" if rank.gpu is not None else "memory"
        sizes = {name: getattr(rank, f"{name}_bytes") for name in ("allocated", "reserved", "peak", "headroom")}
        known = "".join(f", {name} {_size(size)}" for name, size in sizes.items() if size is not None)
        lines.append(f"  rank {rank.rank} (process {rank.pid}): {place}, holds {_size(rank.held_bytes)}{known}")
    return lines


def find_owner(pid: int) -> str:
    """The name of the user who owns a process, else the user's number; empty when the process cannot be seen."""
    with suppress(OSError):
        uid = os.stat(f"/proc/{pid}").st_uid  # noqa: PTH116 - a path of the kernel, not a file
        with suppress(KeyError):
            return pwd.getpwuid(uid).pw_name
        return str(uid)
    return ""


def _read_rank(rank: int, pid: int, *, metrics: dict[str, Any], budget: int | None, machine: Machine) -> RankMemory:
    entries = metrics.get("ranks_memory") or [metrics]  # one entry a rank, or the main rank's fields alone
    memory = entries[rank] if rank < len(entries) else {}
    holders = ((gpu, process.used_bytes) for gpu in machine.gpus for process in gpu.processes if process.pid == pid)
    gpu, held = next(holders, (None, None))
    resident, on_cpu = resident_bytes(pid), not machine.gpus
    peak = memory.get("peak_bytes") or memory.get("peak_rss_bytes") or (resident[1] if resident and on_cpu else None)
    held = held if held is not None or not on_cpu else (resident[0] if resident else None)
    most = max((size for size in (memory.get("reserved_bytes"), peak, held) if size is not None), default=None)
    limit = budget or (machine.ram_bytes if on_cpu else gpu.total_bytes if gpu else None)
    headroom = None if most is None or limit is None else limit - most
    return RankMemory(
        rank=rank, pid=pid, gpu=gpu.index if gpu else None, held_bytes=held, peak_bytes=peak, headroom_bytes=headroom,
        allocated_bytes=memory.get("allocated_bytes"), reserved_bytes=memory.get("reserved_bytes"),
    )  # fmt: skip


def _size(size: int | None) -> str:
    return "?" if size is None else format_bytes(size) if size >= 0 else f"-{format_bytes(-size)}"
