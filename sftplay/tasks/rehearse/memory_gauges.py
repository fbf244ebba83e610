"""Gauges of memory: the most bytes held in each phase of a training step, on a GPU or, for tests and benchmarks, a CPU.

They say what was held, not why; phases are whatever words `enter` is given.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import torch

from sftplay.monitor.metrics import peak_rss_bytes
from sftplay.tasks.rehearse.live_bytes import LiveBytes

Kind = Literal["cuda", "tensors", "process"]

CLEAR_REFS = Path("/proc/self/clear_refs")
STATUS = Path("/proc/self/status")


class MemoryGauge(ABC):
    """Keeps the largest peak of each phase; what a peak is, its kinds say."""

    def __init__(self) -> None:
        self.peaks_bytes: dict[str, int] = {}
        self._phase: str | None = None

    def enter(self, phase: str) -> None:
        """The phase that was is over; peaks belong to `phase` from now on."""
        self._close()
        self._phase = phase
        self.restart()

    def take(self) -> dict[str, int]:
        """Peaks by phase since the last call."""
        self._close()
        taken, self.peaks_bytes, self._phase = self.peaks_bytes, {}, None
        return taken

    def follow(self, model: Any) -> None:  # noqa: B027
        """Count what `model` holds already."""

    def wait(self) -> None:  # noqa: B027
        """Return when the device has done all it was told to."""

    def settle(self) -> None:  # noqa: B027
        """Give back what is only cached."""

    def reserved_bytes(self) -> int | None:
        """The most the allocator has held since `settle`; None without one."""
        return None

    def device(self) -> dict[str, int] | None:
        """Total, free and reserved bytes of the device now; None without one."""
        return None

    @abstractmethod
    def restart(self) -> None:
        """Peaks count from now on."""

    @abstractmethod
    def peak(self) -> int:
        """The most bytes since `restart`."""

    def _close(self) -> None:
        if self._phase is not None:
            self.peaks_bytes[self._phase] = max(self.peaks_bytes.get(self._phase, 0), self.peak())


class CudaGauge(MemoryGauge):
    """What torch's allocator hands out on this process's GPU."""

    def __init__(self) -> None:
        super().__init__()
        self._reserved = 0

    def restart(self) -> None:
        self._note_reserved()
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated()

    def wait(self) -> None:
        torch.cuda.synchronize()

    def settle(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self._reserved = 0

    def reserved_bytes(self) -> int:
        self._note_reserved()
        return self._reserved

    def device(self) -> dict[str, int]:
        free, total = torch.cuda.mem_get_info()
        return {"total_bytes": total, "free_bytes": free, "reserved_bytes": torch.cuda.memory_reserved()}

    def _note_reserved(self) -> None:
        self._reserved = max(self._reserved, torch.cuda.max_memory_reserved())


class TensorGauge(MemoryGauge):
    """Bytes of the tensors that live, on any device, as operators make them; slow, and blind to what kernels take."""

    def __init__(self, live: LiveBytes) -> None:
        super().__init__()
        self._live = live

    def follow(self, model: Any) -> None:
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.detach()  # an operator shows the storage to the mode that is in force

    def restart(self) -> None:
        self._live.forget_peaks()
        self._live.enter_phase("now")

    def peak(self) -> int:
        return self._live.peaks_bytes["now"]


class ProcessGauge(MemoryGauge):
    """Resident memory of this process; on Linux the peak of each phase, elsewhere the peak so far."""

    def restart(self) -> None:
        if CLEAR_REFS.exists():
            CLEAR_REFS.write_text("5")  # resets VmHWM: proc(5)

    def peak(self) -> int:
        if sys.platform != "linux":
            return peak_rss_bytes()
        held = STATUS.read_text().split("VmHWM:")[1].split()[0]
        return int(held) * 1024


def make_memory_gauge(kind: Kind) -> tuple[MemoryGauge, Any]:
    """The gauge and a context in which it works."""
    if kind == "tensors":
        live = LiveBytes()
        return TensorGauge(live), live
    gauge = CudaGauge() if kind == "cuda" else ProcessGauge()
    return gauge, nullcontext()
