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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import combinations, permutations
from pathlib import Path
from types import ModuleType
from typing import Any

from sftplay.machine.gpu import Gpu as Gpu
from sftplay.machine.gpu import GpuProcess, MigInstance, ram_free_bytes, ram_limit_bytes
from sftplay.machine.gpu import Machine as Machine


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


PLAIN_RECOMPUTATION = {"use_reentrant": False}
"""For `torch.utils.checkpoint`: the kind that goes with frozen weights and with DDP."""


@cache
def recomputation() -> str:
    """The word for recomputing activations in transformers; new releases warn of the one they had before."""
    from transformers import TrainingArguments

    new = "activation_checkpointing"
    return new if new in TrainingArguments.__dataclass_fields__ else "gradient_checkpointing"


def as_named_here(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a TrainingArguments by their names of today. It takes old names too, and ignores them next to new
    ones."""
    return {name.replace("gradient_checkpointing", recomputation()): value for name, value in arguments.items()}


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
class Present:
    """One GPU of the machine, in PCI order. `instances` are the UUIDs of its MIG instances; None while MIG is off."""

    uuid: str
    instances: tuple[str, ...] | None = None


def choose(present: Sequence[Present], visible: str | None) -> tuple[list[tuple[int, int | None]], str]:
    """The devices in CUDA's order, and the reason when there is none.

    A device is the index of a GPU, and that of the MIG instance on it, None for a whole GPU. `visible` is the value of
    CUDA_VISIBLE_DEVICES; None when it is not set. Devices after the first one that does not exist do not count, and a
    device named twice leaves none (torch/cuda/__init__.py, _parse_visible_devices). A process sees one MIG instance at
    most, and then it sees no whole GPU (NVIDIA MIG User Guide, CUDA Device Enumeration).
    """
    if visible is not None and visible.strip() in ("", "-1"):
        return [], "CUDA_VISIBLE_DEVICES hides every GPU"
    choices: list[tuple[int, int | None]] = []
    if visible is not None:
        choices = _find_named(present, visible)
    else:
        for index, gpu in enumerate(present):
            choices += [(index, None)] if gpu.instances is None else [(index, n) for n in range(len(gpu.instances))]
    if len(set(choices)) < len(choices):
        return [], f"CUDA_VISIBLE_DEVICES={visible} names a GPU twice, then CUDA gives none"
    instances = [choice for choice in choices if choice[1] is not None]
    if chosen := instances[:1] or choices:
        return chosen, ""
    if visible is not None:
        return [], f"CUDA_VISIBLE_DEVICES={visible} names no GPU of this machine"
    if any(gpu.instances is not None for gpu in present):
        return [], "MIG is on, and there is no instance: `nvidia-smi mig -cgi PROFILE -C` makes one"
    return [], "the driver sees no GPU"


def _find_named(present: Sequence[Present], visible: str) -> list[tuple[int, int | None]]:
    choices: list[tuple[int, int | None]] = []
    for name in map(str.strip, visible.split(",")):
        found: list[tuple[int, int | None]]
        if name.startswith("MIG-"):
            uuids = [(i, n, uuid) for i, gpu in enumerate(present) for n, uuid in enumerate(gpu.instances or ())]
            found = [(index, n) for index, n, uuid in uuids if uuid.startswith(name)]
        elif name.isdigit():
            found = [(int(name), None)] if int(name) < len(present) else []
        else:
            found = [(index, None) for index, gpu in enumerate(present) if name and gpu.uuid.startswith(name)]
        if len(found) == 1 and found[0][1] is None and (instances := present[found[0][0]].instances) is not None:
            found = [(found[0][0], 0)] if instances else []  # the name of a whole GPU stands for its first instance
        if len(found) != 1:
            break  # CUDA itself ignores everything after the first device that does not exist
        choices += found
    return choices


LEVELS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""NVML_TOPOLOGY_* as `nvidia-smi topo -m` names them; 0 is two GPUs on one board."""

SWITCH = "switch"
"""The far end of an NVLink that is not a GPU. In virtual machines the driver does not know it: counted as a switch."""


def read_gpus(*, in_detail: bool = False) -> dict[str, Any]:
    """What the driver says now, by fields of `Machine`: devices, or why there is none; `in_detail` more than memory."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return {"gpus": (), "gpu_reason": choose((), visible)[1]}
    try:
        import pynvml as nvml
    except ImportError:
        return {"gpus": (), "gpu_reason": "the package nvidia-ml-py is not installed"}
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return {"gpus": (), "gpu_reason": f"no NVIDIA driver answered ({error})"}
    try:
        return _read(nvml, visible, in_detail=in_detail)
    finally:
        nvml.nvmlShutdown()


def _read(nvml: Any, visible: str | None, *, in_detail: bool) -> dict[str, Any]:
    handles = [_ask(nvml, "nvmlDeviceGetHandleByIndex", n) for n in range(_ask(nvml, "nvmlDeviceGetCount") or 0)]
    slices: list[list[Any] | None] = []  # handles of each GPU's MIG instances; None when MIG is off, or not known
    for handle in handles:
        mode: Any = _ask(nvml, "nvmlDeviceGetMigMode", handle) if handle is not None else None
        is_on = bool(mode) and mode[0] == nvml.NVML_DEVICE_MIG_ENABLE
        count = (_ask(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle) or 0) if is_on else 0
        instances = [_ask(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", handle, n) for n in range(count)]
        slices.append([instance for instance in instances if instance is not None] if is_on else None)
    uuids = [_read_text(nvml, handle) for handle in handles]
    present = [
        Present(uuid, None if group is None else tuple(_read_text(nvml, mig) for mig in group))
        for uuid, group in zip(uuids, slices, strict=True)
    ]
    chosen, reason = choose(present, visible)
    gpus = [
        _read_gpu(nvml, index, handle=(slices[place] or [])[n] if n is not None else handles[place],
                  whole=handles[place], place=place, in_detail=in_detail)
        for index, (place, n) in enumerate(chosen)
    ]  # fmt: skip
    whole = [handles[place] for place, n in chosen if n is None]
    wants_links = in_detail and len(whole) > 1
    cuda = _ask(nvml, "nvmlSystemGetCudaDriverVersion_v2")
    return {
        "gpus": tuple(gpus),
        "gpu_reason": reason,
        "driver": _as_text(_ask(nvml, "nvmlSystemGetDriverVersion")),
        "cuda_driver": (cuda // 1000, cuda % 1000 // 10) if cuda else None,
        "links": _read_links(nvml, whole) if wants_links else (),
        "without_peer_access": tuple(_find_strangers(nvml, whole)) if wants_links else (),
        "mig_instances": tuple(
            MigInstance(_read_text(nvml, mig), _read_text(nvml, mig, field="Name"), n, *_read_memory(nvml, mig)[:2])
            for n, group in enumerate(slices)
            for mig in group or ()
        ),
        "notes": tuple(f"GPU {n} does not answer" for n, handle in enumerate(handles) if handle is None),
    }


def _read_gpu(nvml: Any, index: int, *, handle: Any, whole: Any, place: int, in_detail: bool) -> Gpu:
    """A device of this process; `whole` is the GPU that a MIG instance is part of. Mute GPUs have no handles (None)."""
    total, free, used = _read_memory(nvml, handle)
    gpu = Gpu(
        index=index, name=_read_text(nvml, handle, field="Name") or "GPU without an answer", total_bytes=total,
        free_bytes=free, used_bytes=used, uuid=_read_text(nvml, handle), machine_index=place,
        capability=tuple(_ask(nvml, "nvmlDeviceGetCudaComputeCapability", whole) or (0, 0)),
        bus_id=_read_bus(nvml, "nvmlDeviceGetPciInfo", whole), is_mig=handle is not whole,
    )  # fmt: skip
    if not in_detail or whole is None:
        return gpu
    power, limit = (_ask(nvml, f"nvmlDeviceGet{field}", whole) for field in ("PowerUsage", "EnforcedPowerLimit"))
    rows, errors = _ask(nvml, "nvmlDeviceGetRemappedRows", whole), nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    holders: dict[int, int | None] = {}  # a process that computes and draws is in both of NVML's lists
    for kind in ("Compute", "Graphics"):
        for process in _ask(nvml, f"nvmlDeviceGet{kind}RunningProcesses", handle) or ():
            holders[process.pid] = max(holders.get(process.pid) or 0, process.usedGpuMemory or 0) or None
    processes = [
        GpuProcess(pid, _as_text(_ask(nvml, "nvmlSystemGetProcessName", pid)).rpartition("/")[2], used_bytes)
        for pid, used_bytes in holders.items()
    ]
    return replace(
        gpu,
        temperature_c=_ask(nvml, "nvmlDeviceGetTemperature", whole, nvml.NVML_TEMPERATURE_GPU),
        power_w=None if power is None else power / 1000,
        power_limit_w=None if limit is None else limit / 1000,
        busy_percent=getattr(_ask(nvml, "nvmlDeviceGetUtilizationRates", handle), "gpu", None),
        memory_errors=_ask(nvml, "nvmlDeviceGetTotalEccErrors", whole, errors, nvml.NVML_VOLATILE_ECC),
        needs_reset=None if rows is None else bool(rows[2]),
        is_failing=None if rows is None else bool(rows[3]),
        compute_mode=_ask(nvml, "nvmlDeviceGetComputeMode", whole),
        processes=tuple(sorted(processes, key=lambda process: (-(process.used_bytes or 0), process.pid))),
    )


def _read_memory(nvml: Any, handle: Any) -> tuple[int, int, int]:
    """Total, free and used bytes. Version 2 leaves out what the driver reserves, as nvidia-smi does.

    A GPU without memory of its own (GB10, Jetson) gives no answer: it uses the memory of the machine.
    """
    if handle is None:
        return 0, 0, 0
    memory = _ask(nvml, "nvmlDeviceGetMemoryInfo", handle, version=nvml.nvmlMemory_v2)
    memory = memory or _ask(nvml, "nvmlDeviceGetMemoryInfo", handle)
    if memory is None:
        total, free = ram_limit_bytes(), ram_free_bytes()
        return total, free, total - free
    return int(memory.total), int(memory.free), int(memory.used)


def _read_links(nvml: Any, handles: list[Any]) -> tuple[tuple[str, ...], ...]:
    """A square matrix in nvidia-smi's terms, with X on its diagonal and ? where the driver does not say."""
    buses = [_read_bus(nvml, "nvmlDeviceGetPciInfo", handle) for handle in handles]
    ends: list[list[str]] = []  # where each active NVLink of a GPU ends: another GPU's bus address, or a switch
    for handle in handles:
        ends.append([])
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            is_active = _ask(nvml, "nvmlDeviceGetNvLinkState", handle, link)
            if is_active is None:
                break  # this link does not exist, and no later one either
            kind = _ask(nvml, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, link) if is_active else None
            if kind == nvml.NVML_NVLINK_DEVICE_TYPE_GPU:
                ends[-1].append(_read_bus(nvml, "nvmlDeviceGetNvLinkRemotePciInfo", handle, link))
            elif is_active:
                ends[-1].append(SWITCH)
    rows = [["X"] * len(handles) for _ in handles]
    for a, b in permutations(range(len(handles)), 2):
        joined = ends[a].count(buses[b]) or min(ends[a].count(SWITCH), ends[b].count(SWITCH))
        level = LEVELS.get(_ask(nvml, "nvmlDeviceGetTopologyCommonAncestor", handles[a], handles[b]), "?")
        rows[a][b] = f"NV{joined}" if joined else level
    return tuple(map(tuple, rows))


def _find_strangers(nvml: Any, handles: list[Any]) -> Iterator[tuple[int, int]]:
    """Pairs of GPUs that cannot read each other's memory. Pairs without an answer of the driver are left out."""
    reading = 0  # NVML_P2P_CAPS_INDEX_READ; in the package it is the tuple (0,), because of a stray comma
    for a, b in combinations(range(len(handles)), 2):
        status = _ask(nvml, "nvmlDeviceGetP2PStatus", handles[a], handles[b], reading)
        if status not in (None, nvml.NVML_P2P_STATUS_OK):
            yield a, b


def _ask(nvml: Any, function: str, *args: Any, **kwargs: Any) -> Any:
    """The answer of one NVML function; None when the card, the driver or the package does not support or allow it."""
    call = getattr(nvml, function, None)
    if call is None:
        return None
    try:
        return call(*args, **kwargs)
    except nvml.NVMLError:
        return None


def _as_text(answer: Any) -> str:
    """An answer as text, empty for None. NVML's strings are bytes in packages before 11.515."""
    if answer is None:
        return ""
    return answer.decode(errors="replace") if isinstance(answer, bytes) else str(answer)


def _read_text(nvml: Any, handle: Any, *, field: str = "UUID") -> str:
    return _as_text(_ask(nvml, f"nvmlDeviceGet{field}", handle)) if handle is not None else ""


def _read_bus(nvml: Any, function: str, *args: Any) -> str:
    return _as_text(getattr(_ask(nvml, function, *args), "busId", None))


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
