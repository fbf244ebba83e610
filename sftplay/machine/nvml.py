"""Asks the NVIDIA driver through nvidia-ml-py: the only module that opens it, and it always closes it.

What a card, a driver or a permission has no answer for is None, never an error: consumer cards have no ECC, laptops no
power limit, old drivers no MIG.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from sftplay.machine.gpu import Gpu, GpuProcess, GpuReading, MigInstance
from sftplay.machine.ram import ram_free_bytes, ram_limit_bytes
from sftplay.machine.visible_devices import Choice, Present, choose


def ask(nvml: Any, function: str, *args: Any, **kwargs: Any) -> Any:
    """What one NVML function returns; None where card, driver, permission or package has no answer."""
    call = getattr(nvml, function, None)
    if call is None:
        return None
    try:
        return call(*args, **kwargs)
    except nvml.NVMLError:
        return None


def as_text(answer: Any) -> str:
    """NVML's strings are bytes in packages before 11.515; an absent answer is empty."""
    if answer is None:
        return ""
    return answer.decode(errors="replace") if isinstance(answer, bytes) else str(answer)


Handles = list[Any | None]
"""One a GPU of the machine, in PCI order; None for a GPU that does not answer."""


def read_gpus(*, in_detail: bool = False) -> GpuReading:
    """The devices this process may use, and the reason when there is none.

    `in_detail` adds heat, power, errors, processes and links; without it the driver is asked as little as possible.
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


def _read(nvml: Any, visible: str | None, *, in_detail: bool) -> GpuReading:
    count = ask(nvml, "nvmlDeviceGetCount") or 0
    handles: Handles = [ask(nvml, "nvmlDeviceGetHandleByIndex", place) for place in range(count)]
    slices = [_mig_handles(nvml, handle) for handle in handles]
    present = [_present(nvml, handle, slices[place]) for place, handle in enumerate(handles)]
    chosen, reason = choose(present, visible)
    gpus = tuple(_device(nvml, index, choice, (handles, slices)) for index, choice in enumerate(chosen))
    if in_detail:
        gpus = tuple(_with_details(nvml, gpu, _handle(own, handles, slices)) for gpu, own in zip(gpus, chosen))
    whole = [handles[place] for place, instance in chosen if instance is None]
    cuda = ask(nvml, "nvmlSystemGetCudaDriverVersion_v2")
    return GpuReading(
        gpus=gpus,
        reason=reason,
        driver=as_text(ask(nvml, "nvmlSystemGetDriverVersion")),
        cuda=(cuda // 1000, cuda % 1000 // 10) if cuda else None,
        links=read_links(nvml, whole) if in_detail and len(whole) > 1 else (),
        without_peer_access=read_peers(nvml, whole) if in_detail and len(whole) > 1 else (),
        instances=tuple(_instance(nvml, place, each) for place, group in enumerate(slices) for each in group or ()),
        notes=tuple(f"GPU {place} does not answer" for place, handle in enumerate(handles) if handle is None),
    )


def _mig_handles(nvml: Any, handle: Any) -> list[Any] | None:
    """Handles of a GPU's instances; None while MIG is off or unknown to it."""
    mode = ask(nvml, "nvmlDeviceGetMigMode", handle) if handle is not None else None
    if not mode or mode[0] != nvml.NVML_DEVICE_MIG_ENABLE:
        return None
    most = ask(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle) or 0
    found = (ask(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", handle, n) for n in range(most))
    return [each for each in found if each is not None]


def _present(nvml: Any, handle: Any, slices: list[Any] | None) -> Present:
    uuid = as_text(ask(nvml, "nvmlDeviceGetUUID", handle)) if handle is not None else ""
    if slices is None:
        return Present(uuid)
    return Present(uuid, tuple(as_text(ask(nvml, "nvmlDeviceGetUUID", each)) for each in slices))


def _handle(choice: Choice, handles: Handles, slices: list[list[Any] | None]) -> tuple[Any, Any]:
    """Handle of the device itself, and of the whole GPU it is or lies on."""
    place, instance = choice
    whole = handles[place]
    own = whole if instance is None else (slices[place] or [])[instance]
    return own, whole


def _device(nvml: Any, index: int, choice: Choice, known: tuple[Handles, list[list[Any] | None]]) -> Gpu:
    own, whole = _handle(choice, *known)
    total, free, used = _memory(nvml, own)
    return Gpu(
        index=index,
        name=as_text(ask(nvml, "nvmlDeviceGetName", own)) or "GPU without an answer",
        total_bytes=total,
        free_bytes=free,
        capability=tuple(ask(nvml, "nvmlDeviceGetCudaComputeCapability", whole) or (0, 0)),
        used_bytes=used,
        uuid=as_text(ask(nvml, "nvmlDeviceGetUUID", own)),
        bus_id=as_text(getattr(ask(nvml, "nvmlDeviceGetPciInfo", whole), "busId", None)),
        machine_index=choice[0],
        is_mig=choice[1] is not None,
    )


def _memory(nvml: Any, handle: Any) -> tuple[int, int, int]:
    """Total, free and used bytes. Version 2 keeps apart what the driver reserves, as nvidia-smi does.

    A GPU without memory of its own (GB10, Jetson) has no answer: there it is the machine's.
    """
    if handle is None:
        return 0, 0, 0
    memory = ask(nvml, "nvmlDeviceGetMemoryInfo", handle, version=nvml.nvmlMemory_v2)
    memory = memory or ask(nvml, "nvmlDeviceGetMemoryInfo", handle)
    if memory is None:
        total, free = ram_limit_bytes(), ram_free_bytes()
        return total, free, total - free
    return int(memory.total), int(memory.free), int(memory.used)


def _instance(nvml: Any, place: int, handle: Any) -> MigInstance:
    total, free, _ = _memory(nvml, handle)
    uuid, name = (as_text(ask(nvml, f"nvmlDeviceGet{what}", handle)) for what in ("UUID", "Name"))
    return MigInstance(uuid, name, place, total, free)


def _with_details(nvml: Any, gpu: Gpu, handles: tuple[Any, Any]) -> Gpu:
    own, whole = handles
    if whole is None:
        return gpu
    power, limit = (ask(nvml, f"nvmlDeviceGet{what}", whole) for what in ("PowerUsage", "EnforcedPowerLimit"))
    rows = ask(nvml, "nvmlDeviceGetRemappedRows", whole)
    return replace(
        gpu,
        temperature_c=ask(nvml, "nvmlDeviceGetTemperature", whole, nvml.NVML_TEMPERATURE_GPU),
        power_w=None if power is None else power / 1000,
        power_limit_w=None if limit is None else limit / 1000,
        busy_percent=getattr(ask(nvml, "nvmlDeviceGetUtilizationRates", own), "gpu", None),
        memory_errors=ask(
            nvml, "nvmlDeviceGetTotalEccErrors", whole, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ),
        needs_reset=None if rows is None else bool(rows[2]),
        is_failing=None if rows is None else bool(rows[3]),
        compute_mode=ask(nvml, "nvmlDeviceGetComputeMode", whole),
        processes=_processes(nvml, own),
    )


def _processes(nvml: Any, handle: Any) -> tuple[GpuProcess, ...]:
    """Who holds memory, most first; a process that computes and draws is in both of NVML's lists."""
    found: dict[int, int | None] = {}
    for kind in ("Compute", "Graphics"):
        for each in ask(nvml, f"nvmlDeviceGet{kind}RunningProcesses", handle) or ():
            found[each.pid] = max(found.get(each.pid) or 0, each.usedGpuMemory or 0) or None
    holders = (
        GpuProcess(pid, as_text(ask(nvml, "nvmlSystemGetProcessName", pid)).rsplit("/", 1)[-1], used)
        for pid, used in found.items()
    )
    return tuple(sorted(holders, key=lambda holder: (-(holder.used_bytes or 0), holder.pid)))


LEVELS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""NVML_TOPOLOGY_* in the words of `nvidia-smi topo -m`; 0 is two GPUs on one board."""

SWITCH = "switch"
"""The far end of an NVLink that is no GPU. In virtual machines the driver cannot tell what it is: a switch too."""


def read_links(nvml: Any, handles: list[Any]) -> tuple[tuple[str, ...], ...]:
    """A square matrix in nvidia-smi's words; X on its diagonal, ? where the driver does not say."""
    buses = [as_text(getattr(ask(nvml, "nvmlDeviceGetPciInfo", handle), "busId", None)) for handle in handles]
    ends = [_far_ends(nvml, handle) for handle in handles]
    rows = []
    for a, first in enumerate(handles):
        row = []
        for b, second in enumerate(handles):
            joined = ends[a].count(buses[b]) or min(ends[a].count(SWITCH), ends[b].count(SWITCH))
            level = LEVELS.get(ask(nvml, "nvmlDeviceGetTopologyCommonAncestor", first, second), "?") if a != b else "X"
            row.append(f"NV{joined}" if joined and a != b else level)
        rows.append(tuple(row))
    return tuple(rows)


def read_peers(nvml: Any, handles: list[Any]) -> tuple[tuple[int, int], ...]:
    """Pairs of which the driver says that they cannot read each other's memory."""
    pairs = [(a, b) for a in range(len(handles)) for b in range(a + 1, len(handles))]
    reading = 0  # NVML_P2P_CAPS_INDEX_READ, which the package has as the tuple (0,) by a stray comma
    told = {(a, b): ask(nvml, "nvmlDeviceGetP2PStatus", handles[a], handles[b], reading) for a, b in pairs}
    return tuple(pair for pair, status in told.items() if status not in (None, nvml.NVML_P2P_STATUS_OK))


def _far_ends(nvml: Any, handle: Any) -> list[str]:
    """Where each active NVLink of a GPU ends: another GPU's bus address, or a switch."""
    ends = []
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        is_active = ask(nvml, "nvmlDeviceGetNvLinkState", handle, link)
        if is_active is None:
            break  # no such link, and so none behind it
        if not is_active:
            continue
        kind = ask(nvml, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
        if kind == nvml.NVML_NVLINK_DEVICE_TYPE_GPU:
            ends.append(as_text(getattr(ask(nvml, "nvmlDeviceGetNvLinkRemotePciInfo", handle, link), "busId", None)))
        else:
            ends.append(SWITCH)
    return ends
