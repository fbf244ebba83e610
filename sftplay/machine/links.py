"""How the GPUs of a machine reach each other: NVLink, PCIe, peer access. It is handed an open NVML and its handles."""

from __future__ import annotations

from typing import Any

from sftplay.machine.answer import as_text, ask

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
