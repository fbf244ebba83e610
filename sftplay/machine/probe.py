"""Facts about this machine: GPUs, memory, cores, disk, and the installed libraries."""

from __future__ import annotations

import ast
import json
import mmap
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from sftplay.machine.gpu import Gpu as Gpu
from sftplay.machine.gpu import MigInstance, ram_free_bytes, read_gpus
from sftplay.machine.gpu import ram_limit_bytes as ram_limit_bytes


def find_compiler_problem(environ: Mapping[str, str] = os.environ) -> str:
    """Why Triton cannot build its launcher here; empty where it can (triton 3.7, runtime/build.py)."""
    named = environ.get("CC", "").split()
    if named and shutil.which(named[0]) is None:
        return f"CC={environ['CC']} is no command here"
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


ANSWER_S = 60.0  # Longest wait for an import of torch. A cold disk is slow.

_QUESTION = """
import json, torch
cuda = torch.cuda
report = {"version": torch.__version__, "cuda": torch.version.cuda, "is_available": cuda.is_available()}
report["archs"] = cuda.get_arch_list()
report["devices"] = cuda.device_count()
if report["is_available"]:
    report["nccl"] = ".".join(map(str, cuda.nccl.version()))
    report["cudnn"] = torch.backends.cudnn.version()
    report["peers"] = [[i == j or cuda.can_device_access_peer(i, j) for j in range(cuda.device_count())]
                     for i in range(cuda.device_count())]
print("ANSWER" + json.dumps(report))
"""


@dataclass(frozen=True)
class TorchBuild:
    """One build of torch."""

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
        """`cuda` as numbers."""
        match = re.match(r"(\d+)\.(\d+)", self.cuda or "")
        return (int(match[1]), int(match[2])) if match else None


def find_torch(*, with_archs: bool = False) -> TorchBuild | None:
    """The installed torch, or None. `with_archs` searches 30 MB of code, some hundredths of a second."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    try:
        nodes = ast.parse((folder / "version.py").read_text(encoding="utf-8")).body
    except (OSError, SyntaxError):
        nodes = []
    facts: dict[str, Any] = {}
    for node in nodes:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            facts[ast.unparse(target)] = node.value.value
    cuda, hip = facts.get("cuda"), facts.get("hip")
    archs = find_archs(folder / "lib" / "libtorch_python.so") if with_archs and cuda else ()
    return TorchBuild(str(facts.get("__version__", "unknown")), cuda, hip, archs)


def find_archs(library: Path) -> tuple[str, ...]:
    """The value of `torch.cuda.get_arch_list()`: one string, CUDA_ARCH_FLAGS of torch/csrc/cuda/Module.cpp."""
    with suppress(OSError, ValueError), library.open("rb") as handle:
        with mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as content:
            match = re.search(rb"\x00(sm_\d+[a-z]?(?: (?:sm|compute)_\d+[a-z]?)*)\x00", content)
            text = match[1].decode() if match else ""
            del match  # it would keep the map open
            return tuple(text.split())
    return ()


def ask_torch() -> dict[str, Any]:
    """What torch reports about this machine, from a process of its own. Only `error` when it cannot be imported."""
    argv = [sys.executable, "-c", _QUESTION]
    try:
        process = subprocess.run(argv, capture_output=True, text=True, timeout=ANSWER_S, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {ANSWER_S:.0f} s"}
    if process.returncode == 0 and "ANSWER" in process.stdout:
        return dict(json.loads(process.stdout.rpartition("ANSWER")[2]))
    last = process.stderr.strip().rpartition("\n")[2]
    return {"error": last or f"it ended with code {process.returncode}"}


OLDEST = "2026.10.9"
"""The first release that trains without a GPU (the one before ends with "You need a GPU"). This kit was tried with it.
An install without a lower bound resolves to a release of 2025, which states no upper bounds."""

PACKAGES = ("unsloth", "unsloth_zoo")

NEEDED = ("torch", "transformers", "trl", "datasets", "peft", "accelerate", "bitsandbytes")
"""The requirements that training uses. unsloth imports the others (torchvision, xformers, diffusers, ...) only when
they are installed; this was tried on a CPU without any of them."""


def find_unsloth_problem(*, has_gpu: bool) -> str:
    """Why unsloth cannot be used here; empty when no reason is known."""
    if find_spec("unsloth") is None:
        return "the package unsloth is not installed"
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name
    from packaging.version import Version

    for package in PACKAGES:
        version = installed_version(package)
        if version is None:
            return f"the package {package} is not installed"
        if Version(version) < Version(OLDEST):
            return f"{package} {version} is too old, {OLDEST} is the first that is known to work"
        for requirement in map(Requirement, metadata.requires(package) or []):
            name = canonicalize_name(requirement.name)
            if name not in NEEDED or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
                continue
            installed = installed_version(name)
            if installed is None:
                return f"{package} {version} needs {name}, which is not installed"
            broken = [str(part) for part in requirement.specifier if not part.contains(installed, prereleases=True)]
            if broken:
                wanted = ", ".join(sorted(broken))
                return f"{package} {version} wants {name} {wanted}, and {installed} is installed"
    if not has_gpu and os.environ.get("UNSLOTH_DISABLE_CPU_FALLBACK") == "1":
        return "there is no GPU, and UNSLOTH_DISABLE_CPU_FALLBACK=1 forbids unsloth to use the CPU"
    return ""


def installed_version(package: str) -> str | None:
    """Version of an installed package, from its metadata; None when it is not installed."""
    with suppress(PackageNotFoundError):
        return metadata.version(package)
    return None


WORD_OF_BEFORE = "gradient_checkpointing"

PLAIN_RECOMPUTATION = {"use_reentrant": False}
"""For `torch.utils.checkpoint`: the kind that goes with frozen weights and with DDP."""


@cache
def recomputation() -> str:
    """The word for recomputing activations in transformers; new releases warn of the one they had before."""
    from transformers import TrainingArguments

    new = "activation_checkpointing"
    return new if new in TrainingArguments.__dataclass_fields__ else WORD_OF_BEFORE


def as_named_here(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a TrainingArguments by their names of today. It takes old names too, and ignores them next to new
    ones."""
    return {name.replace(WORD_OF_BEFORE, recomputation()): value for name, value in arguments.items()}


def recomputation_arguments(*, recomputes: bool) -> dict[str, Any]:
    """The arguments of a TrainingArguments that switch it on or off."""
    word = recomputation()
    return {word: recomputes, f"{word}_kwargs": dict(PLAIN_RECOMPUTATION) if recomputes else None}


def page_argument() -> str:
    """ContinuousBatchingConfig's argument for tokens a page: block_size in transformers 5.17, page_size later."""
    from transformers import ContinuousBatchingConfig

    return "page_size" if "page_size" in ContinuousBatchingConfig.__dataclass_fields__ else "block_size"


def is_recomputing(model: Any) -> bool:
    """True when a model of transformers recomputes its activations; False for any other model."""
    return bool(getattr(model, f"is_{recomputation()}", False))


def recompute(model: Any) -> None:
    """Let a model of transformers compute its layers anew in backward passes."""
    word = recomputation()
    getattr(model, f"{word}_enable")(**{f"{word}_kwargs": dict(PLAIN_RECOMPUTATION)})


@contextmanager
def nothing_recomputed(model: Any) -> Iterator[None]:
    """The model without recomputation, which a cache does not go with; switched on again afterwards if it was on."""
    was_on = is_recomputing(model)
    if was_on:
        getattr(model, f"{recomputation()}_disable")()
    try:
        yield
    finally:
        if was_on:
            recompute(model)


TAKEN_BY_TRL = ("0.22.0", "0.31.0")  # oldest and newest vLLM that trl 1.16 takes

VLLM_INSTALL = "pip install vllm==0.31.0"  # the newest that trl 1.16 takes, and made for torch 2.13


def vllm_problem() -> str:
    """Why trl cannot use the installed vLLM; empty where it can, or where no release of vLLM is installed.

    trl itself only warns (1.16, import_utils.py, `is_vllm_available`), and fails later. The releases that it takes are
    read from its source: an import of trl takes seconds.
    """
    spec = find_spec("trl")
    source = Path(spec.origin).with_name("import_utils.py") if spec and spec.origin else None
    text = source.read_text(encoding="utf-8") if source and source.is_file() else ""
    found = re.search(r'Version\("([\d.]+)"\) <= _vllm_base_version <= Version\("([\d.]+)"\)', text)
    oldest, newest = (found[1], found[2]) if found else TAKEN_BY_TRL
    try:
        installed = version("vllm")
    except PackageNotFoundError:
        return ""
    parts = [re.findall(r"\d+", release.partition("+")[0]) for release in (oldest, installed, newest)]
    numbers = [[*map(int, part), 0, 0][:3] for part in parts]
    return "" if numbers == sorted(numbers) else f"trl takes vllm {oldest} to {newest}, and {installed} is installed"


def hub_client() -> ModuleType:
    """The library by which the hub's client speaks HTTP, for its classes of errors: httpx or httpx2."""
    from huggingface_hub.errors import HfHubHTTPError

    error = next(kind for kind in HfHubHTTPError.__mro__ if kind.__name__ == "HTTPError")
    return sys.modules[error.__module__.partition(".")[0]]


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
