"""Facts about this machine: GPUs, memory with the container's limit, cores, disk, library versions.

Nothing is decided here, and torch is not imported. Whatever is absent comes with the reason.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sftplay.machine.gpu import Gpu as Gpu
from sftplay.machine.gpu import MigInstance, read_gpus
from sftplay.machine.libraries import TorchBuild, find_torch, find_unsloth_problem
from sftplay.machine.ram import ram_free_bytes
from sftplay.machine.ram import ram_limit_bytes as ram_limit_bytes

LIBRARIES = (
    "torch", "transformers", "trl", "peft", "accelerate", "datasets", "bitsandbytes", "deepspeed", "tensorboard",
    "pydantic", "unsloth", "unsloth_zoo",
)  # fmt: skip

OTHER_MAKERS = {"0x1002": "AMD", "0x8086": "Intel"}  # PCI vendors whose GPUs this kit does not use


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
    without_peer_access: tuple[tuple[int, int], ...] = ()
    mig_instances: tuple[MigInstance, ...] = ()
    notes: tuple[str, ...] = ()
    unsloth_problem: str = "it was not searched for"
    """Why unsloth cannot be used; empty when it can."""

    @property
    def ram_available(self) -> int:
        """Bytes of memory that a run may count on now."""
        return self.ram_bytes if self.ram_free_bytes is None else min(self.ram_bytes, self.ram_free_bytes)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def probe(*, in_detail: bool = False) -> Machine:
    """The facts about this machine, in some tens of milliseconds. `in_detail` adds GPU facts that only people want."""
    reading = read_gpus(in_detail=in_detail)
    others = () if reading.gpus else other_accelerators()
    return Machine(
        gpus=reading.gpus, gpu_reason=reading.reason, ram_bytes=ram_limit_bytes(), cores=usable_cores(),
        python=platform.python_version(), system=f"{platform.system()} {platform.release()} {platform.machine()}",
        libraries=library_versions(), ram_free_bytes=ram_free_bytes(), disk_free_bytes=shutil.disk_usage(".").free,
        driver=reading.driver, cuda_driver=reading.cuda, torch=find_torch(with_archs=bool(reading.gpus)),
        links=reading.links, without_peer_access=reading.without_peer_access, mig_instances=reading.instances,
        notes=(*reading.notes, *others), unsloth_problem=find_unsloth_problem(has_gpu=bool(reading.gpus)),
    )  # fmt: skip


def find_gpus() -> tuple[tuple[Gpu, ...], str]:
    """The CUDA devices that this process may use, and the reason when there is none."""
    reading = read_gpus()
    return reading.gpus, reading.reason


def other_accelerators(root: Path = Path("/")) -> tuple[str, ...]:
    """Lines about GPUs that are not used: those of other makers, Apple's, an NVIDIA card without a working driver."""
    if platform.system() == "Darwin" and platform.machine() == "arm64":
        return ("Apple's GPU (MPS) is here; this kit trains on CUDA or the CPU",)
    notes = []
    for device in sorted(root.glob("sys/bus/pci/devices/*")):
        try:
            vendor, kind = ((device / name).read_text(encoding="ascii").strip() for name in ("vendor", "class"))
        except (OSError, UnicodeDecodeError):
            continue
        if not kind.startswith(("0x0300", "0x0302", "0x1200")):  # VGA, 3D controller, processing accelerator
            continue
        if vendor in OTHER_MAKERS:
            notes.append(f"an {OTHER_MAKERS[vendor]} GPU is at {device.name}; this kit trains on CUDA or the CPU")
        elif vendor == "0x10de":
            notes.append(f"an NVIDIA GPU is at {device.name}, but its driver does not answer here")
    return tuple(notes)


def usable_cores() -> int:
    """Number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def library_versions() -> dict[str, str]:
    """Installed version of each library that the kit builds on; absent ones are left out.

    Read from the names of the folders that installers leave. importlib.metadata would parse the whole description of
    each package, which takes a third of the time of `gpu-info`.
    """
    versions: dict[str, str] = {}
    for folder in dict.fromkeys(sys.path):
        try:
            names = [path.name for path in Path(folder or ".").iterdir()]
        except OSError:
            continue
        for name in names:
            library, _, version = name.removesuffix(".dist-info").partition("-")
            if name.endswith(".dist-info") and library.lower() in LIBRARIES:
                versions.setdefault(library.lower(), version)
    return {name: versions[name] for name in LIBRARIES if name in versions}
