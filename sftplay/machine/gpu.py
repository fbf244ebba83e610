"""Facts about a machine without asking it for its GPUs: memory and cores of this process's container."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sftplay.machine.probe import TorchBuild

ROOT = Path("/")

ALL_HIDDEN = "CUDA_VISIBLE_DEVICES hides every GPU"

MEMORY = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
"""Names of limit and usage in the folder of a group, by version 2 and 1 of cgroups."""

UNLIMITED = 1 << 60  # cgroup v1 writes a number near 2**63 for "no limit"


def physical_ram_bytes() -> int:
    """Memory of the whole machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def ram_limit_bytes(root: Path = ROOT) -> int:
    """Memory that this process may use: the machine's, or the lowest limit of its groups."""
    limits = (_number(group / name) for group in _groups(root, "memory") for name, _ in MEMORY)
    return min([physical_ram_bytes(), *(limit for limit in limits if limit is not None and limit < UNLIMITED)])


def ram_free_bytes(root: Path = ROOT) -> int:
    """Memory that this process may still take. Cached files count as free: the kernel drops them when needed."""
    free = [ram_limit_bytes(root)]
    available = _fields(root / "proc/meminfo").get("MemAvailable")
    free += [available * 1024] if available is not None else []
    for group, (limit_name, usage_name) in product(_groups(root, "memory"), MEMORY):
        limit, usage = _number(group / limit_name), _number(group / usage_name)
        if limit is not None and usage is not None and limit < UNLIMITED:
            stat = _fields(group / "memory.stat")
            cached = stat.get("total_inactive_file", stat.get("inactive_file", 0))
            free.append(max(0, limit - usage + cached))
    return min(free)


def visible_cores() -> int:
    """Number of cores that this process may run on; libraries start as many threads, whatever the quota."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_cores(root: Path = ROOT) -> int:
    """Number of cores that this process may use: those that it sees, or the lowest quota of its groups, rounded up."""
    cores = visible_cores()
    for group in _groups(root, "cpu"):
        v1 = [_text(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        quota, period = _text(group / "cpu.max").split() or v1
        if quota.isdigit() and period.isdigit():  # neither `max` nor -1
            cores = min(cores, -(-int(quota) // int(period)))
    return cores


def resident_bytes(pid: int, root: Path = ROOT) -> tuple[int, int] | None:
    """Resident set of a process: now, and at its peak. None when there is no such process."""
    fields = _fields(root / f"proc/{pid}/status")
    if "VmRSS" not in fields:
        return None
    return fields["VmRSS"] * 1024, fields.get("VmHWM", fields["VmRSS"]) * 1024


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's groups, by either version of cgroups, the innermost first; some may not exist.

    In a container the path may be the host's, which does not exist there. Then the top folder is the container's group.
    """
    paths: dict[str, str] = {}  # controller -> path of this process's group; the empty controller is version 2
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path)
    for key, mount in ((controller, controller), ("", ""), ("", "unified")):
        inner = Path(paths.get(key, "/").lstrip("/"))
        yield from (root / "sys/fs/cgroup" / mount / part for part in (inner, *inner.parents))


def _fields(path: Path) -> dict[str, int]:
    """`Name: 12 kB` or `name 12` lines as numbers."""
    columns = (line.replace(":", " ").split() for line in _text(path).splitlines())
    return {names[0]: int(names[1]) for names in columns if len(names) > 1 and names[1].isdigit()}


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


@dataclass(frozen=True)
class GpuProcess:
    """A process that holds memory of a GPU, as the driver sees it: in a container its pid may be the host's."""

    pid: int
    name: str
    used_bytes: int | None


@dataclass(frozen=True)
class Gpu:
    """One device, numbered as CUDA numbers it. Details are None unless they were asked for."""

    index: int
    name: str
    total_bytes: int
    free_bytes: int
    capability: tuple[int, int]
    used_bytes: int = 0
    uuid: str = ""
    bus_id: str = ""
    machine_index: int = 0
    """Its number among all GPUs of the machine in the order of the PCI bus, as nvidia-smi counts them."""
    is_mig: bool = False
    """True for an instance of a GPU: memory is the instance's, temperature and power are the whole GPU's."""
    temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    busy_percent: int | None = None
    memory_errors: int | None = None
    """Uncorrected ECC errors since the driver was loaded."""
    needs_reset: bool | None = None
    """Memory rows wait for a reset to be replaced."""
    is_failing: bool | None = None
    """Memory rows could not be replaced: the card must be exchanged."""
    compute_mode: int | None = None
    """NVML's NVML_COMPUTEMODE_*: 0 shared, 2 prohibited, 3 one process."""
    processes: tuple[GpuProcess, ...] = ()

    @property
    def has_bf16(self) -> bool:
        """bf16 arithmetic in hardware: compute capability 8.0 (Ampere) and later."""
        return self.capability >= (8, 0)

    @property
    def plannable_bytes(self) -> int:
        """Memory that a run may count on: all but what others hold and what the driver keeps."""
        return min(self.total_bytes, self.free_bytes)


@dataclass(frozen=True)
class MigInstance:
    """A slice of a GPU. `CUDA_VISIBLE_DEVICES=<uuid>` selects it; a process gets one at most."""

    uuid: str
    name: str
    machine_index: int
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class Machine:
    """What a run may count on, and why something is absent. The fields from `driver` on are for people."""

    gpus: tuple[Gpu, ...]
    gpu_reason: str
    ram_bytes: int
    cores: int
    python: str
    system: str
    libraries: dict[str, str]
    ram_free_bytes: int | None = None
    disk_free_bytes: int | None = None
    """Free space of the current folder's file system, where runs are written."""
    driver: str = ""
    cuda_driver: tuple[int, int] | None = None
    """The newest CUDA that the driver runs."""
    torch: TorchBuild | None = None
    links: tuple[tuple[str, ...], ...] = ()
    """How the visible GPUs are linked, a square matrix in nvidia-smi's terms: NV12, PIX, PXB, PHB, NODE, SYS."""
    without_peer_access: tuple[tuple[int, int], ...] = ()
    """Pairs of visible GPUs that cannot read each other's memory."""
    mig_instances: tuple[MigInstance, ...] = ()
    """Every MIG instance of the machine, visible or not."""
    notes: tuple[str, ...] = ()
    unsloth_problem: str = "it was not searched for"
    """Why unsloth cannot be used; empty when it can."""

    @property
    def ram_available(self) -> int:
        """Bytes of memory that a run may count on now."""
        return self.ram_bytes if self.ram_free_bytes is None else min(self.ram_bytes, self.ram_free_bytes)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
