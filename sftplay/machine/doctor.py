"""The doctor: compare facts about the machine with what a run needs; each result with its remedy."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from sftplay.machine.gpu import Gpu, physical_ram_bytes
from sftplay.machine.gpu_info import holders, label
from sftplay.machine.ports import HOST, RENDEZVOUS_PORT, bound_port
from sftplay.machine.probe import Machine, compiler_remedy, find_compiler_problem
from sftplay.machine.releases import installed_version
from sftplay.places import ROOT, cache_root, find_hub_cache, find_hub_home, find_vllm_python
from sftplay.units import GIB, format_bytes

Level = Literal["ok", "warn", "stop"]


@dataclass(frozen=True)
class CheckResult:
    """`stop` means that training would fail or be worthless. `fix` is one action; it is empty where all is well."""

    level: Level
    subject: str
    what: str
    fix: str = ""

    def as_text(self) -> str:
        """`warn  disk: 4.00 GiB free` and its remedy in a second line."""
        head = f"{self.level:<5} {self.subject}: {self.what}"
        return f"{head}\n        fix: {self.fix}" if self.fix else head


LEAST_RAM_BYTES = 2 * GIB  # torch, transformers and a tiny model take about 1.5 GiB
LEAST_DISK_BYTES = GIB

ROOMY_DISK_BYTES = 10 * GIB  # one or two checkpoints of most adapters, with logs and the cache of the data
OPEN_FILES = 4096  # Ranks, data workers and shards of a data set each keep some files open
ALLOCATORS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # both name the same setting; the first is the newer


def check_memory(machine: Machine) -> list[CheckResult]:
    """RAM, with the limit of the container."""
    total = physical_ram_bytes()
    limit = f"; this container may use {format_bytes(machine.ram_bytes)}" if machine.ram_bytes < total else ""
    what = f"{format_bytes(machine.ram_available)} free of {format_bytes(total)}{limit}"
    if machine.ram_available < LEAST_RAM_BYTES:
        return [CheckResult("warn", "memory", what, "end other programs, or raise the container's limit")]
    return [CheckResult("ok", "memory", what)]


def check_disk(output: Path, checkpoint_bytes: int | None, *, kept: int) -> list[CheckResult]:
    """Room for the checkpoints that are kept and the one being written. `checkpoint_bytes` is None when not known."""
    folder = nearest_folder(output)
    if not os.access(folder, os.W_OK):
        return [CheckResult("stop", "disk", f"{folder} cannot be written", "choose another output_dir")]
    free, needed = shutil.disk_usage(folder).free, LEAST_DISK_BYTES
    what = f"{format_bytes(free)} free for {output}"
    if checkpoint_bytes is not None:
        needed = checkpoint_bytes * (kept + 1)
        what += f"; {kept} checkpoints and the one being written take {format_bytes(needed)}"
    is_tight = checkpoint_bytes is None and free < ROOMY_DISK_BYTES
    level: Level = "stop" if free < needed else "warn" if is_tight else "ok"
    fix = "make room there, or choose another output_dir"
    return [CheckResult(level, "disk", what, "" if level == "ok" else fix)]


def check_shared_memory(machine: Machine) -> list[CheckResult]:
    """Shared memory of the container. With too little of it a run ends with a bus error."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return []
    free = shutil.disk_usage(folder).free
    least = GIB if len(machine.gpus) > 1 else 64 * 2**20  # for NCCL and data loaders; containers get 64 MiB by default
    what = f"{format_bytes(free)} free in {folder}"
    if free < least:
        fix = "start the container with --shm-size=8g or --ipc=host"
        return [CheckResult("warn", "shared memory", f"{what}, {format_bytes(least)} are needed", fix)]
    return [CheckResult("ok", "shared memory", what)]


def check_ports() -> list[CheckResult]:
    """Whether the processes of a run can meet."""
    if not bound_port(0):
        fix = "allow connections on the loopback device"
        return [CheckResult("stop", "ports", f"no port can be opened on {HOST}", fix)]
    if not bound_port(RENDEZVOUS_PORT):
        what = f"port {RENDEZVOUS_PORT}, where runs over several machines meet, is taken"
        return [CheckResult("warn", "ports", what, "give such a run another: MASTER_PORT=29512")]
    return [CheckResult("ok", "ports", "processes can meet on this machine")]


def check_limits() -> list[CheckResult]:
    """How many files a process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < OPEN_FILES:
        return [CheckResult("warn", "open files", f"a process may open {soft}", "ulimit -n 65536")]
    return [CheckResult("ok", "open files", f"a process may open {'any number' if soft < 0 else soft}")]


def check_environment(machine: Machine, environ: Mapping[str, str] = os.environ) -> list[CheckResult]:
    """Environment variables that change how torch and NCCL work, and that are easily forgotten."""
    allocators = {name: environ[name] for name in ALLOCATORS if environ.get(name)}
    broken = [name for name, value in allocators.items() if any(":" not in part for part in value.split(","))]
    results = [
        CheckResult("stop", "environment", f"{name}={allocators[name]} is not a list of key:value",
                    f"export {name}=expandable_segments:True")
        for name in broken
    ]  # fmt: skip
    has_nvlink = any(kind.startswith("NV") for row in machine.links for kind in row)
    forgotten = {}
    if len(set(allocators.values())) > 1:
        forgotten[ALLOCATORS[1]] = f"{ALLOCATORS[0]} and {ALLOCATORS[1]} differ"
    if environ.get("CUDA_LAUNCH_BLOCKING") == "1":
        forgotten["CUDA_LAUNCH_BLOCKING"] = "CUDA_LAUNCH_BLOCKING=1 makes every kernel wait; it is for debugging"
    if environ.get("NCCL_P2P_DISABLE") == "1" and has_nvlink:
        forgotten["NCCL_P2P_DISABLE"] = "NCCL_P2P_DISABLE=1 leaves the NVLinks of this machine unused"
    results += [CheckResult("warn", "environment", what, f"unset {name}") for name, what in forgotten.items()]
    if results or not machine.gpus:
        return results
    settings = ", ".join(f"{name}={value}" for name, value in allocators.items())
    return [CheckResult("ok", "environment", settings or f"{ALLOCATORS[1]} is not set")]


def builds_folder(environ: Mapping[str, str]) -> Path:
    """The folder of the operators that torch builds when a run starts: the user's, else in this project."""
    return Path(environ.get("TORCH_EXTENSIONS_DIR") or cache_root() / "torch_extensions").absolute()


def check_builds(environ: Mapping[str, str] = os.environ) -> list[CheckResult]:
    """Locks of builds that were killed. Every later start waits for such a lock for ever and without a message.

    torch's FileBaton holds the file open while it builds. Therefore a lock that no process has open is stale.
    """
    locks, processes = sorted(builds_folder(environ).glob("*/lock")), Path("/proc")
    if not locks or not processes.is_dir():
        return []
    open_files = set()
    for folder in processes.glob("[0-9]*/fd"):
        with suppress(OSError):  # the process has ended, or is another user's
            for link in folder.iterdir():
                with suppress(OSError):  # closed meanwhile
                    open_files.add(str(link.readlink()))
    stale = [lock for lock in locks if str(lock.resolve()) not in open_files]
    if not stale:
        return [CheckResult("ok", "builds", f"{len(locks)} operators of DeepSpeed are being built now")]
    what = f"a build was killed and left {', '.join(map(str, stale))}; DeepSpeed runs that build would wait for ever"
    return [CheckResult("warn", "builds", what, shlex.join(["rm", *map(str, stale)]))]


def nearest_folder(path: Path) -> Path:
    """`path` itself, or the nearest folder above it that exists."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.is_dir())


RANGES = {
    "torch": ">=2.6,<2.15",
    "transformers": ">=5.10,<6",
    "trl": ">=1.14,!=1.15.0,<1.18",
    "peft": ">=0.19,<1",
    "accelerate": ">=1.12,<2",
    "datasets": ">=4.5,<6",
    "bitsandbytes": ">=0.49",
    "tensorboard": ">=2.18",
    "pydantic": ">=2.10,<3",
}
"""The ranges of pyproject.toml. They cannot be read from metadata where the kit runs from a checkout."""

OPTIONAL = {"bitsandbytes": "4-bit weights (tuning.mode: qlora)", "tensorboard": "the TensorBoard tracker"}
"""Libraries that only some runs need, and what needs them."""

UNSLOTH_LIMITS = {"datasets": "<5", "transformers": "<5.18", "trl": "<1.16"}  # unsloth 2026.10 refuses newer versions


def check_libraries(machine: Machine) -> list[CheckResult]:
    """Missing libraries, versions outside the tested ranges, and combinations that are known not to work."""
    versions, results = machine.libraries, []
    for name in RANGES:
        if name not in versions:
            level: Level = "warn" if name in OPTIONAL else "stop"
            need = f": no {OPTIONAL[name]}" if name in OPTIONAL else ""
            results.append(CheckResult(level, "versions", f"{name} is not installed{need}", "make install"))
    for name, version in versions.items():
        if name in RANGES and not is_within(version, RANGES[name]):
            what = f"{name} {version} is outside {RANGES[name]}, which this kit is made for"
            results.append(CheckResult("warn", "versions", what, "make install, for the versions tested together"))
    if versions.get("trl") == "1.15.0" and not machine.gpus and find_spec("triton") is None:
        what = "trl 1.15.0 cannot train on a CPU without Triton: its loss head is missing there"
        results.append(CheckResult("stop", "versions", what, "make install, which takes another trl"))
    for name, limit in UNSLOTH_LIMITS.items() if find_spec("unsloth") is not None else ():
        if name in versions and not is_within(versions[name], limit):
            what = f"unsloth {installed_version('unsloth')} does not work with {name} {versions[name]}"
            fix = f"pip install '{name}{limit}', or use tuning.backend: bnb"
            results.append(CheckResult("warn", "versions", what, fix))
    return results or [CheckResult("ok", "versions", "all libraries are installed and fit together")]


def check_vllm() -> list[CheckResult]:
    """Whether `make serve` answers by vLLM, and whether that environment was finished."""
    if find_vllm_python():
        return [CheckResult("ok", "serve", "vLLM is installed in .venv-vllm; `make serve` answers by it")]
    if (ROOT / ".venv-vllm/.stamp").exists():
        return [CheckResult("warn", "serve", "the install of .venv-vllm has not ended", "make install-vllm")]
    return [CheckResult("ok", "serve", "by transformers; `make install-vllm` brings vLLM, in its own environment")]


ANSWER_S = 60.0  # Longest wait for an import of torch. A cold disk is slow.

QUESTION = """
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


def ask_torch() -> dict[str, Any]:
    """What torch reports about this machine, from a process of its own. Only `error` when it cannot be imported."""
    argv = [sys.executable, "-c", QUESTION]
    try:
        process = subprocess.run(argv, capture_output=True, text=True, timeout=ANSWER_S, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {ANSWER_S:.0f} s"}
    if process.returncode == 0 and "ANSWER" in process.stdout:
        return dict(json.loads(process.stdout.rpartition("ANSWER")[2]))
    last = process.stderr.strip().rpartition("\n")[2]
    return {"error": last or f"it ended with code {process.returncode}"}


def check_torch(answer: dict[str, Any], machine: Machine) -> list[CheckResult]:
    """Findings from the answer of `ask_torch`: whether torch sees the GPUs that the driver shows."""
    if "error" in answer:
        return [CheckResult("stop", "torch", f"cannot be imported: {answer['error']}", "make install")]
    n_driver, n_torch = len(machine.gpus), answer["devices"]
    if n_driver and not answer["is_available"]:
        fix = "see the driver and torch lines of this list, or restart the machine"
        return [CheckResult("stop", "torch", "the driver shows GPUs, torch can use none", fix)]
    if n_driver != n_torch:
        what = f"sees {n_torch} GPUs, the driver shows {n_driver}"
        fix = "name them in CUDA_VISIBLE_DEVICES by UUID (`make gpu-info --json`)"
        return [CheckResult("warn", "torch", what, fix)]
    nccl = f", NCCL {answer['nccl']}" if "nccl" in answer else ""
    return [CheckResult("ok", "torch", f"can be imported, and sees {n_torch} GPUs{nccl}")]


def check_compiler(machine: Machine) -> list[CheckResult]:
    """Whether Triton can build kernels on a machine with GPUs: Liger, torch.compile and TRL's GRPO use them."""
    if not machine.gpus:
        return []
    if problem := find_compiler_problem():
        what = f"{problem}: Liger and torch.compile cannot build kernels, and GRPO does without TRL's"
        return [CheckResult("warn", "compiler", what, compiler_remedy())]
    return [CheckResult("ok", "compiler", "Triton can build kernels")]


def is_within(version: str, ranges: str) -> bool:
    """True when a release lies within `>=1.2,<2,!=1.15.0`; local and pre-release parts do not count."""
    release = _release(version)
    for part in ranges.split(","):
        sign, bound = re.fullmatch(r"(>=|<|!=)([\d.]+)", part.strip()).groups()  # type: ignore[union-attr]
        limit = _release(bound)
        if {">=": release < limit, "<": release >= limit, "!=": release == limit}[sign]:
            return False
    return True


def _release(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in match[0].split(".")] if match else [0]
    return tuple([*numbers, 0, 0, 0][:4])


DRIVERS = {11: "450", 12: "525", 13: "580"}
"""First driver branch for each major version of CUDA. A driver runs every minor version of it (CUDA release notes,
table of minor version compatibility)."""

HOT_C = 85  # data centre cards slow themselves down between 85 and 90 C (nvidia-smi -q, slowdown temperature)
HELD_SHARE = 0.05  # Share of a GPU's memory. When others hold more than this, the batch becomes smaller.
LEAST_BYTES = GIB  # nothing can be trained with less: a CUDA context and cuBLAS take half of it


def check_gpus(machine: Machine) -> list[CheckResult]:
    """Findings in the order in which they matter."""
    if not machine.gpus:
        if "CUDA_VISIBLE_DEVICES" in machine.gpu_reason:
            return [CheckResult("warn", "gpu", machine.gpu_reason, "unset CUDA_VISIBLE_DEVICES")]
        silent = [note for note in machine.notes if note.startswith("an NVIDIA GPU")]
        if silent or "MIG" in machine.gpu_reason:
            fix = "get `nvidia-smi` to list it: load the driver, or start the container with --gpus all"
            return [CheckResult("stop", "gpu", f"{machine.gpu_reason}; {'; '.join(silent)}".rstrip("; "), fix)]
        return [CheckResult("ok", "gpu", f"none ({machine.gpu_reason}); training runs on the CPU")]
    counts = Counter(gpu.name for gpu in machine.gpus)
    results = [CheckResult("ok", "gpu", ", ".join(f"{n} x {name}" for name, n in counts.items()))]
    fix = "search `dmesg` for its Xid error; a restart of the machine often brings it back"
    mute = [note for note in machine.notes if note.endswith("does not answer")]
    results += [CheckResult("stop", "gpu", note, fix) for note in mute]
    checks = (_driver, _torch, _memory, _states, _mixture, _slices, _peers)
    return results + list(chain.from_iterable(check(machine) for check in checks))


def check_build(machine: Machine) -> list[CheckResult]:
    """Whether the installed torch runs on the driver and on the GPUs that are visible."""
    return [*_driver(machine), *_torch(machine)] if machine.gpus else []


def _driver(machine: Machine) -> list[CheckResult]:
    needs = machine.torch.newest_cuda() if machine.torch else None
    if needs is None or machine.cuda_driver is None:
        return []
    driver = f"{machine.driver} runs CUDA up to {machine.cuda_driver[0]}.{machine.cuda_driver[1]}"
    if machine.cuda_driver[0] >= needs[0]:
        return [CheckResult("ok", "driver", f"{driver}; torch is built for {needs[0]}.{needs[1]}")]
    branch = DRIVERS.get(needs[0], "newer")
    fix = f"install driver {branch} or later"
    if needs[0] > 12:
        fix += f"; from driver {DRIVERS[12]} on, make install takes torch for CUDA 12.6, which runs there"
    return [CheckResult("stop", "driver", f"{driver}; torch is built for {needs[0]}.{needs[1]}", fix)]


def _torch(machine: Machine) -> list[CheckResult]:
    build = machine.torch
    if build is None:
        return []
    if build.cuda is None:
        what = f"{build.version} is not built for CUDA; the GPU would stay idle"
        return [CheckResult("stop", "torch", what, "make install TORCH_INDEX=default")]
    lacking = {gpu.capability: gpu.name for gpu in machine.gpus if build.runs_on(gpu.capability) is False}
    fix = "make install, which takes torch for CUDA 12.6, the last with Volta; TORCH_INDEX= names another build"
    results = []
    for (major, minor), name in lacking.items():
        what = f"{build.version} has no code for {name} (sm_{major}{minor}), only for {' '.join(build.archs)}"
        results.append(CheckResult("stop", "torch", what, fix))
    return results or [CheckResult("ok", "torch", f"{build.version} has code for every GPU here")]


def _memory(machine: Machine) -> list[CheckResult]:
    shared = [gpu for gpu in machine.gpus if gpu.used_bytes > HELD_SHARE * gpu.total_bytes]
    free_gpus = ",".join(str(gpu.machine_index) for gpu in machine.gpus if gpu not in shared)
    fix = f"train on the free ones: CUDA_VISIBLE_DEVICES={free_gpus}" if free_gpus else "end them, or wait for them"
    results = []
    for gpu in shared:
        names = [label(process) for process in holders(gpu)]
        users = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        free, total = format_bytes(gpu.free_bytes), format_bytes(gpu.total_bytes)
        what = f"GPU {gpu.index} has {free} of {total} free; in use by {users or 'unknown processes'}"
        results.append(CheckResult("stop" if gpu.free_bytes < LEAST_BYTES else "warn", "gpu memory", what, fix))
    return results or [CheckResult("ok", "gpu memory", "nobody else holds any")]


RESET, SHARED = "nvidia-smi --gpu-reset -i {}", "nvidia-smi -i {} -c DEFAULT"

# Level, subject, whether a card is in this state, what is said of it, the remedy. NVML_COMPUTEMODE_PROHIBITED is 2,
# NVML_COMPUTEMODE_EXCLUSIVE_PROCESS 3.
STATES: tuple[tuple[Level, str, Callable[[Gpu], object], str, str], ...] = (
    ("stop", "ecc", lambda gpu: gpu.memory_errors,
     "had {.memory_errors} uncorrected memory errors since the driver was loaded", RESET),
    ("stop", "ecc", lambda gpu: gpu.is_failing, "could not replace broken memory rows",
     "leave it out with CUDA_VISIBLE_DEVICES, and have it exchanged"),
    ("warn", "ecc", lambda gpu: gpu.needs_reset and not gpu.is_failing,
     "waits for a reset to replace broken memory rows", RESET),
    ("warn", "heat", lambda gpu: (gpu.temperature_c or 0) >= HOT_C, "is at {.temperature_c} C",
     "check its cooling; it runs slower now"),
    ("stop", "compute mode", lambda gpu: gpu.compute_mode == 2, "takes no process (prohibited)", SHARED),
    ("stop", "compute mode", lambda gpu: gpu.compute_mode == 3 and gpu.processes,
     "takes one process, and has one", SHARED),
)  # fmt: skip


def _states(machine: Machine) -> list[CheckResult]:
    results = [
        CheckResult(level, subject, f"GPU {gpu.index} {what.format(gpu)}", fix.format(gpu.machine_index))
        for level, subject, is_so, what, fix in STATES
        for gpu in machine.gpus
        if is_so(gpu)
    ]
    counts_errors = any(gpu.memory_errors is not None for gpu in machine.gpus)
    if counts_errors and not any(result.subject == "ecc" for result in results):
        results.insert(0, CheckResult("ok", "ecc", "no uncorrected memory errors"))
    return results


def _mixture(machine: Machine) -> list[CheckResult]:
    """GPUs that differ: the smallest decides, and CUDA may number them otherwise than nvidia-smi does."""
    kinds = {(gpu.name, gpu.total_bytes) for gpu in machine.gpus}
    if len(kinds) < 2:
        return []
    smallest = min(machine.gpus, key=lambda gpu: gpu.total_bytes)
    groups = ([gpu for gpu in machine.gpus if (gpu.name, gpu.total_bytes) == kind] for kind in sorted(kinds))
    chosen = ",".join(str(gpu.machine_index) for gpu in max(groups, key=len))
    what = f"the GPUs differ: every process is planned for the smallest ({smallest.name})"
    results = [CheckResult("warn", "gpu", what, f"train on equal ones: CUDA_VISIBLE_DEVICES={chosen}")]
    if os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        what = "CUDA numbers the fastest GPU first: its numbers may not be those of nvidia-smi and gpu-info"
        results.append(CheckResult("warn", "gpu", what, "export CUDA_DEVICE_ORDER=PCI_BUS_ID"))
    return results


def _slices(machine: Machine) -> list[CheckResult]:
    if not any(gpu.is_mig for gpu in machine.gpus):
        return []
    name, n = machine.gpus[0].name, len(machine.mig_instances)
    what = f"a process sees one of {n} instances, here {name}; several processes of one run cannot use the others"
    fix = "choose another with CUDA_VISIBLE_DEVICES=<its UUID>, see `make gpu-info`"
    return [CheckResult("warn" if n > 1 else "ok", "mig", what, fix if n > 1 else "")]


def _peers(machine: Machine) -> list[CheckResult]:
    if len(machine.gpus) < 2:
        return []
    missing = ", ".join(f"{a}-{b}" for a, b in machine.without_peer_access)
    if missing:
        what = f"GPUs {missing} have no peer access: NCCL copies through the host's memory, which is slower"
        return [CheckResult("warn", "nccl", what, "export NCCL_P2P_DISABLE=1 if a start hangs; prefer NVLink pairs")]
    return [CheckResult("ok", "nccl", "every pair of GPUs has peer access")]


WAIT_S = 4.0  # longest wait for the hub's answer
TRUE_VALUES = ("1", "ON", "YES", "TRUE")  # values of an environment variable that huggingface_hub reads as true
LOGIN = "hf auth login, or export HF_TOKEN="


def check_hub(model: str | None, *, is_fast: bool, environ: Mapping[str, str] = os.environ) -> list[CheckResult]:
    """Offline settings, cache and token; without `is_fast` also whether the hub answers. `model`: a run's hub name."""
    results, folder = [], find_hub_cache(environ)
    if not os.access(nearest_folder(folder), os.W_OK):
        fix = "export HF_HOME=<a folder of yours>"
        results.append(CheckResult("warn", "hub cache", f"{folder} cannot be written", fix))
    cached, names = model is not None and is_cached(model, environ), ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    if offline := next((name for name in names if environ.get(name, "").upper() in TRUE_VALUES), ""):
        if model is None or cached:
            return [*results, CheckResult("ok", "hub", f"{offline} is set: the hub is not asked")]
        what = f"{offline} is set, and {model} is not in the cache here"
        return [*results, CheckResult("stop", "hub", what, f"unset {offline}, then make download-model MODEL={model}")]
    token = find_token(environ)
    if is_fast:
        state = "is set" if token else "is not set; gated models need one"
        return [*results, CheckResult("ok", "hub token", f"{state} (the hub was not asked about it)")]
    endpoint = environ.get("HF_ENDPOINT", "").rstrip("/")
    if not endpoint and find_spec("huggingface_hub"):
        endpoint = import_module("huggingface_hub.constants").ENDPOINT
    code, error = _request(f"{endpoint}/api/whoami-v2" if token else endpoint, token)
    if error and cached:
        return [*results, CheckResult("ok", "hub", f"does not answer ({error}); {model} is in the cache here")]
    if error:
        fix = "check the network and HTTPS_PROXY, or work offline: export HF_HUB_OFFLINE=1"
        return [*results, CheckResult("warn", "hub", f"does not answer ({error})", fix)]
    results.append(CheckResult("ok", "hub", "answers"))
    if token and code in (401, 403):
        return [*results, CheckResult("warn", "hub token", "the hub refuses it", LOGIN)]
    state = "the hub accepts it" if token else f"is not set; gated models need one ({LOGIN})"
    return [*results, CheckResult("ok", "hub token", state)]


def find_token(environ: Mapping[str, str] = os.environ) -> str:
    """The hub's token, from where the hub's own client reads it; empty when there is none."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if environ.get(name):
            return environ[name].strip()
    path = Path(environ.get("HF_TOKEN_PATH") or find_hub_home(environ) / "token")
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def is_cached(model: str, environ: Mapping[str, str] = os.environ) -> bool:
    """True when the cache of this machine holds a config.json of the hub's model."""
    folder = find_hub_cache(environ) / f"models--{model.replace('/', '--')}"
    return any(folder.glob("snapshots/*/config.json"))


def _request(url: str, token: str) -> tuple[int, str]:
    """The status code; 0 with the reason when the hub does not answer. Any status code shows that the hub is there."""
    import urllib.error  # importing these two takes as long as all the rest of the doctor
    import urllib.request

    headers = {"User-Agent": "sftplay-doctor", **({"Authorization": f"Bearer {token}"} if token else {})}
    try:
        request = urllib.request.Request(url, headers=headers, method="GET" if token else "HEAD")
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            return answer.status, ""
    except urllib.error.HTTPError as error:
        return error.code, ""
    except urllib.error.URLError as error:
        return 0, str(error.reason)
    except (OSError, ValueError) as error:
        return 0, str(error) or type(error).__name__


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
    results += check_memory(machine)
    results += check_disk(needs.output, needs.checkpoint_bytes, kept=needs.checkpoints_kept)
    results += [*check_shared_memory(machine), *check_ports(), *check_limits()]
    results += [*check_environment(machine), *check_builds(), *check_vllm()]
    return results + check_hub(needs.hub_model, is_fast=is_fast)
