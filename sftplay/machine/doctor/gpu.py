"""The doctor's findings about GPUs, their driver and the torch build that runs on them."""

from __future__ import annotations

import os
from collections import Counter
from itertools import chain

from sftplay.machine.doctor.check_result import CheckResult
from sftplay.machine.gpu_info import holders, label
from sftplay.machine.probe import Machine
from sftplay.units import GIB, format_bytes

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
    checks = (_driver, _torch, _memory, _errors, _states, _mixture, _slices, _peers)
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
        return [CheckResult("stop", "torch", what, "make install TORCH_INDEX=<an index with a CUDA build of torch>")]
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


def _errors(machine: Machine) -> list[CheckResult]:
    results = []
    for gpu in machine.gpus:
        reset = f"nvidia-smi --gpu-reset -i {gpu.machine_index}"
        if gpu.memory_errors:
            what = f"GPU {gpu.index} had {gpu.memory_errors} uncorrected memory errors since the driver was loaded"
            results.append(CheckResult("stop", "ecc", what, reset))
        if gpu.is_failing:
            what = f"GPU {gpu.index} could not replace broken memory rows"
            fix = "leave it out with CUDA_VISIBLE_DEVICES, and have it exchanged"
            results.append(CheckResult("stop", "ecc", what, fix))
        elif gpu.needs_reset:
            what = f"GPU {gpu.index} waits for a reset to replace broken memory rows"
            results.append(CheckResult("warn", "ecc", what, reset))
    if not results and any(gpu.memory_errors is not None for gpu in machine.gpus):
        results = [CheckResult("ok", "ecc", "no uncorrected memory errors")]
    return results


def _states(machine: Machine) -> list[CheckResult]:
    """Heat, then compute modes: NVML_COMPUTEMODE_PROHIBITED is 2, NVML_COMPUTEMODE_EXCLUSIVE_PROCESS 3."""
    hot = [gpu for gpu in machine.gpus if gpu.temperature_c is not None and gpu.temperature_c >= HOT_C]
    fix = "check its cooling; it runs slower now"
    results = [CheckResult("warn", "heat", f"GPU {gpu.index} is at {gpu.temperature_c} C", fix) for gpu in hot]
    for gpu in machine.gpus:
        fix = f"nvidia-smi -i {gpu.machine_index} -c DEFAULT"
        if gpu.compute_mode == 2:
            results.append(CheckResult("stop", "compute mode", f"GPU {gpu.index} takes no process (prohibited)", fix))
        elif gpu.compute_mode == 3 and gpu.processes:
            what = f"GPU {gpu.index} takes one process, and has one"
            results.append(CheckResult("stop", "compute mode", what, fix))
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
