"""Gauges of memory: the most bytes held in each phase of a training step, on this process's GPU.

They say what was held, not why. A phase is any name given to `enter`. `load_gauge` also takes a gauge from
elsewhere: tests and benchmarks measure on a CPU with one of their own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib import import_module
from typing import Any

import torch

CUDA_GAUGE = f"{__name__}:CudaGauge"


class MemoryGauge(ABC):
    """Keeps the largest peak of each phase inside a `with`; a subclass says what a peak is."""

    def __init__(self) -> None:
        self.peaks_bytes: dict[str, int] = {}
        self._phase: str | None = None

    def __enter__(self) -> MemoryGauge:
        return self

    def __exit__(self, *_: Any) -> None:  # noqa: B027
        """Nothing to undo."""

    def enter(self, phase: str) -> None:
        """End the phase before; peaks belong to `phase` from now on."""
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

    def release_cached(self) -> None:  # noqa: B027
        """Give back what is only cached."""

    def reserved_bytes(self) -> int | None:
        """The most the allocator has held since `release_cached`; None without one."""
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

    def release_cached(self) -> None:
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


def load_gauge(name: str) -> MemoryGauge:
    """A gauge by `module:class`."""
    module, _, kind = name.partition(":")
    gauge: MemoryGauge = getattr(import_module(module), kind)()
    return gauge
