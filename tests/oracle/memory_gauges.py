"""Memory gauges for a rehearsal without a GPU: bytes of live tensors, and memory of the process.

A request names one as `oracle.memory_gauges:TensorGauge`; `tests/` must be on the path of the rehearsal's process.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from oracle.live_bytes import LiveBytes
from sftplay.model.out_of_memory import peak_rss_bytes
from sftplay.tasks.probe_step import MemoryGauge

CLEAR_REFS = Path("/proc/self/clear_refs")
STATUS = Path("/proc/self/status")


class HostGauge(MemoryGauge):
    """One of a process without a GPU, which has neither a cache nor anything to wait for."""

    def wait(self) -> None: ...

    def release_cached(self) -> None: ...

    def reserved_bytes(self) -> None:
        return None

    def device(self) -> None:
        return None


class TensorGauge(HostGauge):
    """Bytes of the tensors that live, on any device, as operators make them; slow, and blind to what kernels take."""

    def __init__(self) -> None:
        super().__init__()
        self._live = LiveBytes()

    def __enter__(self) -> TensorGauge:
        self._live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._live.__exit__(*error)

    def follow(self, model: Any) -> None:
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.detach()  # an operator shows the storage to the mode that is in force

    def restart(self) -> None:
        self._live.forget_peaks()
        self._live.enter_phase("now")

    def peak(self) -> int:
        return self._live.peaks_bytes["now"]


class ProcessGauge(HostGauge):
    """Resident memory of this process; on Linux the peak of each phase, elsewhere the peak so far."""

    def restart(self) -> None:
        if CLEAR_REFS.exists():
            CLEAR_REFS.write_text("5")  # resets VmHWM: proc(5)

    def peak(self) -> int:
        if sys.platform != "linux":
            return peak_rss_bytes()
        held = STATUS.read_text().split("VmHWM:")[1].split()[0]
        return int(held) * 1024
