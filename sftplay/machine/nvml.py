"""GPUs as NVIDIA's driver describes them: which ones a process may use, their memory, links and processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations
from typing import Any

from sftplay.machine.gpu import ALL_HIDDEN, Gpu, GpuProcess, MigInstance, ram_free_bytes, ram_limit_bytes


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
        return [], ALL_HIDDEN
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


def read_devices(nvml: Any, visible: str | None, *, in_detail: bool) -> dict[str, Any]:
    """What an open driver says, by fields of `Machine`; `visible` as for `choose`."""
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
