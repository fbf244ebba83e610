"""GPUs: what NVML says of them, and which of them this process may see."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sftplay.machine.ram import ram_free_bytes, ram_limit_bytes


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
class GpuReading:
    """Everything that the driver said at one moment."""

    gpus: tuple[Gpu, ...] = ()
    reason: str = ""
    """Why `gpus` is empty."""
    driver: str = ""
    cuda: tuple[int, int] | None = None
    """The newest CUDA that the driver runs."""
    links: tuple[tuple[str, ...], ...] = ()
    """How the visible GPUs are linked, a square matrix in nvidia-smi's terms: NV12, PIX, PXB, PHB, NODE, SYS."""
    without_peer_access: tuple[tuple[int, int], ...] = ()
    """Pairs of visible GPUs that cannot read each other's memory."""
    instances: tuple[MigInstance, ...] = ()
    """Every MIG instance of the machine, visible or not."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Present:
    """One GPU of the machine, in PCI order. `instances` are the UUIDs of its MIG instances; None while MIG is off."""

    uuid: str
    instances: tuple[str, ...] | None = None


Choice = tuple[int, int | None]
"""Index of a GPU, and of the MIG instance on it; None for a whole GPU."""


def choose(present: Sequence[Present], visible: str | None) -> tuple[list[Choice], str]:
    """The devices in CUDA's order, and the reason when there is none.

    `visible` is the value of CUDA_VISIBLE_DEVICES; None when it is not set. Devices after the first one that does not
    exist do not count, and a device named twice leaves none (torch/cuda/__init__.py, _parse_visible_devices). A process
    sees one MIG instance at most, and then it sees no whole GPU (NVIDIA MIG User Guide, CUDA Device Enumeration).
    """
    if visible is not None and visible.strip() in ("", "-1"):
        return [], "CUDA_VISIBLE_DEVICES hides every GPU"
    choices = _all(present) if visible is None else _named(present, visible)
    if len(set(choices)) < len(choices):
        return [], f"CUDA_VISIBLE_DEVICES={visible} names a GPU twice, then CUDA gives none"
    instances = [choice for choice in choices if choice[1] is not None]
    chosen = instances[:1] or choices
    if chosen:
        return chosen, ""
    if visible is not None:
        return [], f"CUDA_VISIBLE_DEVICES={visible} names no GPU of this machine"
    if any(gpu.instances is not None for gpu in present):
        return [], "MIG is on, and there is no instance: `nvidia-smi mig -cgi PROFILE -C` makes one"
    return [], "the driver sees no GPU"


def _all(present: Sequence[Present]) -> list[Choice]:
    choices: list[Choice] = []
    for index, gpu in enumerate(present):
        choices += [(index, None)] if gpu.instances is None else [(index, n) for n in range(len(gpu.instances))]
    return choices


def _named(present: Sequence[Present], visible: str) -> list[Choice]:
    choices: list[Choice] = []
    for name in map(str.strip, visible.split(",")):
        choice = _find_instance(present, name) if name.startswith("MIG-") else _find_gpu(present, name)
        if choice is None:
            break  # CUDA itself ignores everything after the first device that does not exist
        choices.append(choice)
    return choices


def _find_gpu(present: Sequence[Present], name: str) -> Choice | None:
    indices = (
        [int(name)] if name.isdigit() else [n for n, gpu in enumerate(present) if name and gpu.uuid.startswith(name)]
    )
    if len(indices) != 1 or indices[0] >= len(present):
        return None
    instances = present[indices[0]].instances
    if instances is None:
        return indices[0], None
    return (indices[0], 0) if instances else None


def _find_instance(present: Sequence[Present], name: str) -> Choice | None:
    matches = [
        (index, n)
        for index, gpu in enumerate(present)
        for n, uuid in enumerate(gpu.instances or ())
        if uuid.startswith(name)
    ]
    return matches[0] if len(matches) == 1 else None


LEVELS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""NVML_TOPOLOGY_* as `nvidia-smi topo -m` names them; 0 is two GPUs on one board."""

SWITCH = "switch"
"""The far end of an NVLink that is not a GPU. In virtual machines the driver does not know it: counted as a switch."""


def read_gpus(*, in_detail: bool = False) -> GpuReading:
    """The devices that this process may use, and the reason when there is none.

    `in_detail` adds temperature, power, errors, processes and links. Without it the driver is asked little.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return GpuReading(reason=choose((), visible)[1])
    try:
        import pynvml as nvml
    except ImportError:
        return GpuReading(reason="the package nvidia-ml-py is not installed")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return GpuReading(reason=f"no NVIDIA driver answered ({error})")
    try:
        return _read(nvml, visible, in_detail=in_detail)
    finally:
        nvml.nvmlShutdown()


@dataclass(frozen=True)
class _Device:
    """NVML's handles of a device that CUDA gives this process. They are None for a GPU that does not answer."""

    handle: Any
    whole: Any
    """Handle of the whole GPU: the device itself, or the GPU that a MIG instance is part of."""

    machine_index: int
    is_mig: bool


def _read(nvml: Any, visible: str | None, *, in_detail: bool) -> GpuReading:
    count = _ask(nvml, "nvmlDeviceGetCount") or 0
    handles = [_ask(nvml, "nvmlDeviceGetHandleByIndex", place) for place in range(count)]
    slices = [_mig_handles(nvml, handle) for handle in handles]
    present = [_present(nvml, handle, slices=slices[place]) for place, handle in enumerate(handles)]
    chosen, reason = choose(present, visible)
    devices = [
        _Device(handles[place] if n is None else (slices[place] or [])[n], handles[place], place, n is not None)
        for place, n in chosen
    ]
    gpus = [_gpu(nvml, index, device=device) for index, device in enumerate(devices)]
    if in_detail:
        gpus = [_with_details(nvml, gpu, device=device) for gpu, device in zip(gpus, devices, strict=True)]
    whole = [device.whole for device in devices if not device.is_mig]
    wants_links = in_detail and len(whole) > 1
    cuda = _ask(nvml, "nvmlSystemGetCudaDriverVersion_v2")
    return GpuReading(
        gpus=tuple(gpus),
        reason=reason,
        driver=_as_text(_ask(nvml, "nvmlSystemGetDriverVersion")),
        cuda=(cuda // 1000, cuda % 1000 // 10) if cuda else None,
        links=_links(nvml, whole) if wants_links else (),
        without_peer_access=_without_peer_access(nvml, whole) if wants_links else (),
        instances=tuple(
            _instance(nvml, place, handle=mig) for place, group in enumerate(slices) for mig in group or ()
        ),
        notes=tuple(f"GPU {place} does not answer" for place, handle in enumerate(handles) if handle is None),
    )


def _mig_handles(nvml: Any, handle: Any) -> list[Any] | None:
    """Handles of a GPU's instances; None when MIG is off, or when the GPU does not know it."""
    mode = _ask(nvml, "nvmlDeviceGetMigMode", handle) if handle is not None else None
    if not mode or mode[0] != nvml.NVML_DEVICE_MIG_ENABLE:
        return None
    count = _ask(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle) or 0
    instances = (_ask(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", handle, n) for n in range(count))
    return [instance for instance in instances if instance is not None]


def _present(nvml: Any, handle: Any, *, slices: list[Any] | None) -> Present:
    uuid = _as_text(_ask(nvml, "nvmlDeviceGetUUID", handle)) if handle is not None else ""
    if slices is None:
        return Present(uuid)
    return Present(uuid, tuple(_as_text(_ask(nvml, "nvmlDeviceGetUUID", mig)) for mig in slices))


def _gpu(nvml: Any, index: int, *, device: _Device) -> Gpu:
    total, free, used = _memory(nvml, device.handle)
    return Gpu(
        index=index,
        name=_as_text(_ask(nvml, "nvmlDeviceGetName", device.handle)) or "GPU without an answer",
        total_bytes=total,
        free_bytes=free,
        capability=tuple(_ask(nvml, "nvmlDeviceGetCudaComputeCapability", device.whole) or (0, 0)),
        used_bytes=used,
        uuid=_as_text(_ask(nvml, "nvmlDeviceGetUUID", device.handle)),
        bus_id=_bus_id(_ask(nvml, "nvmlDeviceGetPciInfo", device.whole)),
        machine_index=device.machine_index,
        is_mig=device.is_mig,
    )


def _memory(nvml: Any, handle: Any) -> tuple[int, int, int]:
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


def _instance(nvml: Any, place: int, *, handle: Any) -> MigInstance:
    total, free, _ = _memory(nvml, handle)
    uuid, name = (_as_text(_ask(nvml, f"nvmlDeviceGet{field}", handle)) for field in ("UUID", "Name"))
    return MigInstance(uuid, name, place, total, free)


def _with_details(nvml: Any, gpu: Gpu, *, device: _Device) -> Gpu:
    handle, whole = device.handle, device.whole
    if whole is None:
        return gpu
    power, limit = (_ask(nvml, f"nvmlDeviceGet{field}", whole) for field in ("PowerUsage", "EnforcedPowerLimit"))
    rows = _ask(nvml, "nvmlDeviceGetRemappedRows", whole)
    return replace(
        gpu,
        temperature_c=_ask(nvml, "nvmlDeviceGetTemperature", whole, nvml.NVML_TEMPERATURE_GPU),
        power_w=None if power is None else power / 1000,
        power_limit_w=None if limit is None else limit / 1000,
        busy_percent=getattr(_ask(nvml, "nvmlDeviceGetUtilizationRates", handle), "gpu", None),
        memory_errors=_ask(
            nvml, "nvmlDeviceGetTotalEccErrors", whole, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ),
        needs_reset=None if rows is None else bool(rows[2]),
        is_failing=None if rows is None else bool(rows[3]),
        compute_mode=_ask(nvml, "nvmlDeviceGetComputeMode", whole),
        processes=_processes(nvml, handle),
    )


def _processes(nvml: Any, handle: Any) -> tuple[GpuProcess, ...]:
    """Who holds memory, largest first. A process that computes and draws is in both of NVML's lists."""
    used_bytes: dict[int, int | None] = {}
    for kind in ("Compute", "Graphics"):
        for process in _ask(nvml, f"nvmlDeviceGet{kind}RunningProcesses", handle) or ():
            pid = process.pid
            used_bytes[pid] = max(used_bytes.get(pid) or 0, process.usedGpuMemory or 0) or None
    holders = (
        GpuProcess(pid, _as_text(_ask(nvml, "nvmlSystemGetProcessName", pid)).rpartition("/")[2], used)
        for pid, used in used_bytes.items()
    )
    return tuple(sorted(holders, key=lambda holder: (-(holder.used_bytes or 0), holder.pid)))


def _links(nvml: Any, handles: list[Any]) -> tuple[tuple[str, ...], ...]:
    """A square matrix in nvidia-smi's terms, with X on its diagonal and ? where the driver does not say."""
    buses = [_bus_id(_ask(nvml, "nvmlDeviceGetPciInfo", handle)) for handle in handles]
    ends = [_far_ends(nvml, handle) for handle in handles]
    rows = []
    for a, first in enumerate(handles):
        row = []
        for b, second in enumerate(handles):
            joined = ends[a].count(buses[b]) or min(ends[a].count(SWITCH), ends[b].count(SWITCH))
            level = LEVELS.get(_ask(nvml, "nvmlDeviceGetTopologyCommonAncestor", first, second), "?") if a != b else "X"
            row.append(f"NV{joined}" if joined and a != b else level)
        rows.append(tuple(row))
    return tuple(rows)


def _without_peer_access(nvml: Any, handles: list[Any]) -> tuple[tuple[int, int], ...]:
    """Pairs of GPUs that cannot read each other's memory. Pairs without an answer of the driver are left out."""
    pairs = [(a, b) for a in range(len(handles)) for b in range(a + 1, len(handles))]
    reading = 0  # NVML_P2P_CAPS_INDEX_READ; in the package it is the tuple (0,), because of a stray comma
    answers = {(a, b): _ask(nvml, "nvmlDeviceGetP2PStatus", handles[a], handles[b], reading) for a, b in pairs}
    return tuple(pair for pair, status in answers.items() if status not in (None, nvml.NVML_P2P_STATUS_OK))


def _far_ends(nvml: Any, handle: Any) -> list[str]:
    """Where each active NVLink of a GPU ends: another GPU's bus address, or a switch."""
    ends = []
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        is_active = _ask(nvml, "nvmlDeviceGetNvLinkState", handle, link)
        if is_active is None:
            break  # this link does not exist, and no later one either
        if not is_active:
            continue
        kind = _ask(nvml, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
        if kind == nvml.NVML_NVLINK_DEVICE_TYPE_GPU:
            ends.append(_bus_id(_ask(nvml, "nvmlDeviceGetNvLinkRemotePciInfo", handle, link)))
        else:
            ends.append(SWITCH)
    return ends


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


def _bus_id(pci_info: Any) -> str:
    return _as_text(getattr(pci_info, "busId", None))
