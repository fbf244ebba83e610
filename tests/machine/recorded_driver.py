"""A stand-in for pynvml that answers with the values of a recorded machine, with pynvml's signatures and errors."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pynvml as real

RECORDED = Path(__file__).parent / "recorded"
MACHINES = sorted(path.stem for path in RECORDED.glob("*.json"))
MIB = 2**20
LEVELS = {"PIX": 10, "PXB": 20, "PHB": 30, "NODE": 40, "SYS": 50}


def recorded(name: str) -> dict[str, Any]:
    """A machine's values; the caller may change them."""
    return json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))


def install(monkeypatch: Any, machine: dict[str, Any]) -> Driver:
    """Let `import pynvml` find a driver that answers as `machine`."""
    driver = Driver(copy.deepcopy(machine))
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    return driver


def gpu(name: str = "NVIDIA H200", **changes: Any) -> dict[str, Any]:
    """One GPU in the form of the recordings."""
    plain = {"bus_id": "00000000:01:00.0", "total_mib": 1024, "used_mib": 0, "capability": [9, 0], "processes": []}
    return {"name": name, **plain, **changes}


class Driver(ModuleType):
    """pynvml over a recorded machine. A handle is ("gpu", place) or ("mig", place, instance).

    A value that the recording leaves out is Not Supported, as ECC is on consumer cards. `asked` holds the names of the
    functions that were called.
    """

    def __init__(self, machine: dict[str, Any]) -> None:
        super().__init__("pynvml")
        self.machine, self.is_open, self.init_error, self.asked = machine, False, None, set()
        for name in dir(real):
            if name.startswith(("NVML_", "NVMLError", "nvmlMemory_v2")):
                setattr(self, name, getattr(real, name))

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and name != "nvmlMemory_v2":
            object.__getattribute__(self, "asked").add(name)
        return object.__getattribute__(self, name)

    def _own(self, handle: Any) -> dict[str, Any]:
        own = self.machine["gpus"][handle[1]]
        return own if handle[0] == "gpu" else own["instances"][handle[2]]

    def _value(self, handle: Any, key: str) -> Any:
        if not self.is_open:
            raise real.NVMLError(real.NVML_ERROR_UNINITIALIZED)
        value = self._own(handle).get(key)
        if value is None:
            raise real.NVMLError(real.NVML_ERROR_NOT_SUPPORTED)
        return value

    def nvmlInit(self):
        if self.init_error is not None:
            raise real.NVMLError(self.init_error)
        self.is_open = True

    def nvmlShutdown(self):
        self.is_open = False

    def nvmlSystemGetDriverVersion(self):
        return self._system("driver")

    def nvmlSystemGetCudaDriverVersion_v2(self):
        return self._system("cuda")

    def _system(self, key):
        if self.machine.get(key) is None:
            raise real.NVMLError(real.NVML_ERROR_UNKNOWN)
        return self.machine[key]

    def nvmlSystemGetProcessName(self, pid):
        for own in self.machine["gpus"]:
            for each in own["processes"]:
                if each[0] == pid:
                    return each[2]
        raise real.NVMLError(real.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetCount(self):
        return len(self.machine["gpus"])

    def nvmlDeviceGetHandleByIndex(self, index):
        if self.machine["gpus"][index].get("lost"):
            raise real.NVMLError(real.NVML_ERROR_GPU_IS_LOST)
        return ("gpu", index)

    def nvmlDeviceGetUUID(self, handle):
        own = self._own(handle)
        return own.get("uuid") or f"GPU-00000000-0000-0000-0000-{own['bus_id'].replace(':', '').replace('.', ''):0>12}"

    def nvmlDeviceGetName(self, handle):
        return self._value(handle, "name")

    def nvmlDeviceGetPciInfo(self, handle):
        return SimpleNamespace(busId=self._value(handle, "bus_id"))

    def nvmlDeviceGetMemoryInfo(self, handle, version=None):
        if self._own(handle).get("oldest_memory_only") and version is not None:
            raise real.NVMLError(real.NVML_ERROR_FUNCTION_NOT_FOUND)
        total, used = self._value(handle, "total_mib") * MIB, self._value(handle, "used_mib") * MIB
        reserved = self._own(handle).get("reserved_mib", 0) * MIB
        if version is None:
            return SimpleNamespace(total=total, free=total - used - reserved, used=used + reserved)
        assert version == real.nvmlMemory_v2
        return SimpleNamespace(total=total, free=total - used - reserved, used=used, reserved=reserved)

    def nvmlDeviceGetCudaComputeCapability(self, handle):
        return tuple(self._value(handle, "capability"))

    def nvmlDeviceGetTemperature(self, handle, sensor):
        assert sensor == real.NVML_TEMPERATURE_GPU
        return self._value(handle, "temperature_c")

    def nvmlDeviceGetPowerUsage(self, handle):
        return self._value(handle, "power_w") * 1000

    def nvmlDeviceGetEnforcedPowerLimit(self, handle):
        return self._value(handle, "power_limit_w") * 1000

    def nvmlDeviceGetUtilizationRates(self, handle):
        return SimpleNamespace(gpu=self._value(handle, "busy_percent"), memory=0)

    def nvmlDeviceGetTotalEccErrors(self, handle, errorType, counterType):
        assert (errorType, counterType) == (real.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, real.NVML_VOLATILE_ECC)
        return self._value(handle, "ecc")

    def nvmlDeviceGetRemappedRows(self, device):
        return tuple(self._value(device, "remapped"))

    def nvmlDeviceGetComputeMode(self, handle):
        return self._value(handle, "compute_mode")

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        return self._running(handle, "C")

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle):
        return self._running(handle, "G")

    def _running(self, handle, letter):
        return [
            SimpleNamespace(pid=pid, usedGpuMemory=None if mib is None else mib * MIB, gpuInstanceId=0xFFFFFFFF)
            for pid, kind, _, mib in self._own(handle).get("processes", [])
            if letter in kind
        ]

    def nvmlDeviceGetMigMode(self, device):
        mode = self._value(device, "mig")
        return [mode, mode]

    def nvmlDeviceGetMaxMigDeviceCount(self, device):
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device, index):
        if index >= len(self._own(device).get("instances", [])):
            raise real.NVMLError(real.NVML_ERROR_NOT_FOUND)
        return ("mig", device[1], index)

    def _link(self, device1, device2):
        return self.machine["topology"][device1[1]][device2[1]]

    def nvmlDeviceGetTopologyCommonAncestor(self, device1, device2):
        return LEVELS.get(self._link(device1, device2), real.NVML_TOPOLOGY_NODE)

    def nvmlDeviceGetP2PStatus(self, device1, device2, p2pIndex):
        assert p2pIndex == 0, "NVML_P2P_CAPS_INDEX_READ of nvml.h"
        return self.machine.get("peer_status", real.NVML_P2P_STATUS_OK)

    def _ends(self, device):
        """Far end of each NVLink: places of GPUs, or None for a switch."""
        links = self.machine["topology"][device[1]]
        counts = {place: int(link[2:]) for place, link in enumerate(links) if link.startswith("NV")}
        if self.machine.get("directly_linked"):
            return [place for place, count in counts.items() for _ in range(count)]
        return [None] * max(counts.values(), default=0)

    def _end(self, device, link):
        ends = self._ends(device)
        if link >= len(ends):
            raise real.NVMLError(real.NVML_ERROR_INVALID_ARGUMENT if ends else real.NVML_ERROR_NOT_SUPPORTED)
        return ends[link]

    def nvmlDeviceGetNvLinkState(self, device, link):
        self._end(device, link)
        return 1

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle, link):
        switch = self._end(handle, link) is None
        return real.NVML_NVLINK_DEVICE_TYPE_SWITCH if switch else real.NVML_NVLINK_DEVICE_TYPE_GPU

    def nvmlDeviceGetNvLinkRemotePciInfo(self, device, link):
        return SimpleNamespace(busId=self.machine["gpus"][self._end(device, link)]["bus_id"])
