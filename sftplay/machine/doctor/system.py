"""The doctor's findings about the system around a run: memory, disk, shared memory, ports, limits, environment."""

from __future__ import annotations

import os
import resource
import shlex
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from sftplay.machine.doctor.check_result import CheckResult, Level
from sftplay.machine.ports import HOST, RENDEZVOUS_PORT, bound_port
from sftplay.machine.probe import Machine
from sftplay.machine.ram import physical_ram_bytes
from sftplay.places import cache_root
from sftplay.units import GIB, format_bytes

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


def check_shared_memory(machine: Machine, folder: Path = Path("/dev/shm")) -> list[CheckResult]:
    """Shared memory of the container. With too little of it a run ends with a bus error."""
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


def check_builds(environ: Mapping[str, str] = os.environ, processes: Path = Path("/proc")) -> list[CheckResult]:
    """Locks of builds that were killed. Every later start waits for such a lock for ever and without a message.

    torch's FileBaton holds the file open while it builds. Therefore a lock that no process has open is stale.
    """
    locks = sorted(builds_folder(environ).glob("*/lock"))
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
    what = f"a build was killed and left {', '.join(map(str, stale))}; DeepSpeed runs would wait for it for ever"
    return [CheckResult("warn", "builds", what, shlex.join(["rm", *map(str, stale)]))]


def nearest_folder(path: Path) -> Path:
    """`path` itself, or the nearest folder above it that exists."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.is_dir())
