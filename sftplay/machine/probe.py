"""Facts about this machine: GPUs through NVML, memory with the cgroup's limit, cores, library versions.

Nothing is decided here and torch is not imported; every absent thing comes with the reason why it is absent.
"""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from sftplay.machine.unsloth import find_unsloth_problem

LIBRARIES = (
    "torch", "transformers", "trl", "peft", "accelerate", "datasets", "bitsandbytes", "deepspeed", "tensorboard",
    "pydantic", "unsloth", "unsloth_zoo",
)  # fmt: skip

_UNLIMITED = 1 << 60  # cgroup v1 writes a number near 2**63 for "no limit"


@dataclass(frozen=True)
class Gpu:
    """One CUDA device as NVML reports it."""

    index: int
    name: str
    total_bytes: int
    free_bytes: int
    capability: tuple[int, int]

    @property
    def has_bf16(self) -> bool:
        """bf16 arithmetic in hardware: compute capability 8.0 (Ampere) and later."""
        return self.capability >= (8, 0)


@dataclass(frozen=True)
class Machine:
    """What a run may count on, and why something is not there."""

    gpus: tuple[Gpu, ...]
    gpu_reason: str
    ram_bytes: int
    cores: int
    python: str
    system: str
    libraries: dict[str, str]
    unsloth_problem: str = "nobody has looked for it"
    """Why unsloth cannot be used; empty when it can."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def probe() -> Machine:
    """Look at the machine, in some tens of milliseconds."""
    gpus, reason = find_gpus()
    return Machine(
        gpus=gpus,
        gpu_reason=reason,
        ram_bytes=ram_limit_bytes(),
        cores=usable_cores(),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        libraries=library_versions(),
        unsloth_problem=find_unsloth_problem(has_gpu=bool(gpus)),
    )


def find_gpus() -> tuple[tuple[Gpu, ...], str]:
    """The CUDA devices this process may use, and the reason when there is none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return (), "CUDA_VISIBLE_DEVICES hides every GPU"
    try:
        import pynvml
    except ImportError:
        return (), "the package nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return (), f"no NVIDIA driver answered ({error})"
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in _visible_indices(pynvml, visible)]
        gpus = tuple(_read_gpu(pynvml, index, handle) for index, handle in enumerate(handles))
        return gpus, "" if gpus else f"CUDA_VISIBLE_DEVICES={visible} names no GPU of this machine"
    finally:
        pynvml.nvmlShutdown()


def _visible_indices(pynvml: Any, visible: str | None) -> list[int]:
    count = pynvml.nvmlDeviceGetCount()
    if visible is None:
        return list(range(count))
    by_uuid = {pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(i)): i for i in range(count)}
    chosen = []
    for part in map(str.strip, visible.split(",")):
        index = int(part) if part.isdigit() else next((i for u, i in by_uuid.items() if u.startswith(part)), -1)
        if not 0 <= index < count:
            break  # CUDA itself ignores everything behind the first device that does not exist
        chosen.append(index)
    return chosen


def _read_gpu(pynvml: Any, index: int, handle: Any) -> Gpu:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    name = pynvml.nvmlDeviceGetName(handle)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(index, name, int(memory.total), int(memory.free), (int(major), int(minor)))


def ram_limit_bytes() -> int:
    """Memory this process may use: the machine's, or its cgroup's limit where that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < _UNLIMITED:
            total = min(total, int(text))
    return total


def usable_cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def library_versions() -> dict[str, str]:
    """Installed version of each library the kit builds on; absent ones are left out."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
