"""Facts about this machine: GPUs, memory, cores, disk, and the installed libraries."""

from __future__ import annotations

import mmap
import os
import platform
import re
import shutil
import sys
import sysconfig
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sftplay.machine.gpu import ALL_HIDDEN, ram_free_bytes, ram_limit_bytes, usable_cores
from sftplay.machine.gpu import Gpu as Gpu
from sftplay.machine.gpu import Machine as Machine


def find_compiler_problem() -> str:
    """Why Triton cannot build its launcher here; empty where it can (triton 3.7, runtime/build.py)."""
    named = os.environ.get("CC", "").split()
    if named and shutil.which(named[0]) is None:
        return f"CC={os.environ['CC']} is no command here"
    if not named and not (shutil.which("gcc") or shutil.which("clang")):
        return "there is no C compiler (gcc or clang)"
    header = headers_folder() / "Python.h"
    return "" if header.is_file() else f"Python's headers are not installed ({header})"


def headers_folder() -> Path:
    """Where the headers of this Python lie; Triton knows Debian's own scheme to be the usual one."""
    scheme = sysconfig.get_default_scheme()
    return Path(sysconfig.get_paths(scheme.replace("posix_local", "posix_prefix"))["include"])


def compiler_remedy() -> str:
    """The command that installs both."""
    return f"apt install gcc python{sys.version_info[0]}.{sys.version_info[1]}-dev (Debian, Ubuntu)"


@dataclass(frozen=True)
class TorchBuild:
    version: str
    cuda: str | None
    """The CUDA that it was built with; None for a build without CUDA."""
    hip: str | None = None
    archs: tuple[str, ...] = ()
    """The value of `torch.cuda.get_arch_list()`; empty when it was not searched for, or not found."""

    def runs_on(self, capability: tuple[int, int]) -> bool | None:
        """True when the build has code for this compute capability; None when `archs` is not known.

        Code runs on later minor versions of the same major one too. PTX (`compute_`) runs on every later card, code
        with a letter (`sm_90a`) on that card alone (CUDA C++ programming guide, binary and PTX compatibility).
        """
        for kind, major, minor, letter in re.findall(r"\b(sm|compute)_(\d+)(\d)([a-z]?)\b", " ".join(self.archs)):
            built = (int(major), int(minor))
            is_later = built <= capability and (kind == "compute" or built[0] == capability[0])
            if built == capability or (is_later and not letter):
                return True
        return False if self.archs else None

    def newest_cuda(self) -> tuple[int, int] | None:
        match = re.match(r"(\d+)\.(\d+)", self.cuda or "")
        return (int(match[1]), int(match[2])) if match else None


def find_torch(*, with_archs: bool = False) -> TorchBuild | None:
    """The installed torch, or None. `with_archs` searches 30 MB of code, some hundredths of a second."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    facts: dict[str, str] = {}
    with suppress(OSError):  # lines like __version__ = '2.13.0+cpu' and cuda: Optional[str] = None
        facts = dict(re.findall(r"^(\w+)[^=\n]*= '([^'\n]*)'$", (folder / "version.py").read_text("utf-8"), re.M))
    cuda, hip = facts.get("cuda"), facts.get("hip")
    archs = find_archs(folder / "lib" / "libtorch_python.so") if with_archs and cuda else ()
    return TorchBuild(facts.get("__version__", "unknown"), cuda, hip, archs)


def find_archs(library: Path) -> tuple[str, ...]:
    """The value of `torch.cuda.get_arch_list()`: one string, CUDA_ARCH_FLAGS of torch/csrc/cuda/Module.cpp."""
    with suppress(OSError, ValueError), library.open("rb") as handle:
        with mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as content:
            match = re.search(rb"\x00(sm_\d+[a-z]?(?: (?:sm|compute)_\d+[a-z]?)*)\x00", content)
            text = match[1].decode() if match else ""
            del match  # it would keep the map open
            return tuple(text.split())
    return ()


LIBRARIES = (
    "torch", "transformers", "trl", "peft", "accelerate", "datasets", "bitsandbytes", "deepspeed", "tensorboard",
    "pydantic", "unsloth", "unsloth_zoo",
)  # fmt: skip

OTHER_MAKERS = {"0x1002": "AMD", "0x8086": "Intel"}  # PCI vendors whose GPUs this kit does not use


def find_unsloth_problem(*, has_gpu: bool) -> str:
    """Why unsloth cannot be used here; empty when no reason is known."""
    if find_spec("unsloth") is None:
        return "the package unsloth is not installed"
    from sftplay.machine.releases import find_unsloth_mismatch

    return find_unsloth_mismatch(has_gpu=has_gpu)


def read_gpus(*, in_detail: bool = False) -> dict[str, Any]:
    """What the driver says now, by fields of `Machine`: devices, or why there is none; `in_detail` more than memory."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return {"gpus": (), "gpu_reason": ALL_HIDDEN}
    try:
        import pynvml as nvml
    except ImportError:
        return {"gpus": (), "gpu_reason": "the package nvidia-ml-py is not installed"}
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return {"gpus": (), "gpu_reason": f"no NVIDIA driver answered ({error})"}
    from sftplay.machine.nvml import read_devices

    try:
        return read_devices(nvml, visible, in_detail=in_detail)
    finally:
        nvml.nvmlShutdown()


def probe(*, in_detail: bool = False) -> Machine:
    """The facts about this machine, in some tens of milliseconds. `in_detail` adds GPU facts that only people want."""
    reading = read_gpus(in_detail=in_detail)
    has_gpu = bool(reading["gpus"])
    if not has_gpu:
        reading["notes"] = (*reading.get("notes", ()), *other_accelerators())
    return Machine(
        **reading, ram_bytes=ram_limit_bytes(), cores=usable_cores(), python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}", libraries=library_versions(),
        ram_free_bytes=ram_free_bytes(), disk_free_bytes=shutil.disk_usage(".").free,
        torch=find_torch(with_archs=has_gpu), unsloth_problem=find_unsloth_problem(has_gpu=has_gpu),
    )  # fmt: skip


def find_gpus() -> tuple[tuple[Gpu, ...], str]:
    """The CUDA devices that this process may use, and the reason when there is none."""
    reading = read_gpus()
    return reading["gpus"], reading["gpu_reason"]


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
