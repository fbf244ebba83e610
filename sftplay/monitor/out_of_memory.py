"""Running out of memory: recognised among other errors, agreed on by all ranks, undone and explained.

The window runs the rows again (`tasks.step.window`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from sftplay import log
from sftplay.errors import MachineError
from sftplay.heartbeat import Heartbeat
from sftplay.monitor.metrics import gather_objects, memory_fields
from sftplay.units import format_bytes

CPU_REFUSED = "DefaultCPUAllocator: can't allocate memory"
"""Only this text tells a failed allocation on a CPU from other RuntimeErrors (c10/core/impl/alloc_cpu.cpp)."""

T = TypeVar("T")


class OutOfMemory(MachineError):
    """Memory ran out where the step cannot be run again, or for a single row."""

    code = "memory"

    def __init__(self, what: str, *, where: str = "", fix: str = "", batch_size: int | None = None) -> None:
        super().__init__(what, where=where, fix=fix)
        self.batch_size = batch_size
        """Rows of a micro-batch with which the run may go on from its last checkpoint; None when there are no fewer."""

    def as_json(self) -> dict[str, object]:
        return {**super().as_json(), "batch_size": self.batch_size}


def ran_out_of_memory(error: BaseException) -> bool:
    """True for a failed allocation, on a GPU or a CPU, and for nothing else."""
    return isinstance(error, torch.OutOfMemoryError) or (isinstance(error, RuntimeError) and CPU_REFUSED in str(error))


@dataclass(frozen=True)
class Shortage:
    """Where memory ran out. It holds no tensor: the memory of what failed must be free before the next attempt."""

    rows: int
    tokens: int
    """Of the micro-batch, padding included."""

    phase: str
    held_bytes: int
    """The most this process had held when it failed: by torch's allocator on a GPU, resident on a CPU."""

    reason: str
    """The allocator's first line."""


class Agreement:
    """Lets all ranks know that one of them ran out of memory. Its few bytes are allocated before that happens."""

    def __init__(self, device: Any) -> None:
        self._flag = torch.zeros(1, dtype=torch.int32, device=device)

    def all_shortages(self, mine: Shortage | None, heartbeat: Heartbeat) -> list[Shortage | None]:
        """The shortage of every rank, in rank order; empty when no rank has one. Every rank must call it."""
        if log.world_size() == 1:
            return [mine] if mine else []
        with heartbeat.within("communication"):
            self._flag.fill_(mine is not None)
            torch.distributed.all_reduce(self._flag, torch.distributed.ReduceOp.MAX)
            if not int(self._flag):
                return []
        free_memory()
        return gather_objects(mine, heartbeat)


def held_bytes() -> int:
    """The most memory this process has held so far."""
    held = memory_fields()
    return held["peak_bytes"] if "peak_bytes" in held else held["peak_rss_bytes"]


def free_memory() -> None:
    """Free what a failed micro-batch has left: reference cycles first, then the allocator's blocks."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def describe_shortages(shortages: list[Shortage | None], planned_bytes: int | None) -> str:
    """Which ranks ran out of memory and where, beside the plan's figure."""
    short = [(rank, each) for rank, each in enumerate(shortages) if each]
    _, first = short[0]
    ranks = "" if len(shortages) == 1 else f" on rank {', '.join(str(number) for number, _ in short)}"
    planned = f", {format_bytes(planned_bytes)} planned" if planned_bytes else ""
    return (
        f"out of memory in {first.phase}{ranks}: {first.rows} rows, {first.tokens} tokens at once; "
        f"{format_bytes(first.held_bytes)} held{planned} ({first.reason})"
    )


class AdaptiveBatches:
    """Works on rows in batches. The size is halved for good each time memory does not suffice for a batch.

    For evaluation, where the size of a batch changes nothing but speed.
    """

    def __init__(self, batch_size: int, what: str) -> None:
        self.batch_size = batch_size
        self._what = what

    def each(self, rows: int, work: Callable[[slice], T]) -> Iterator[T]:
        """The result of `work` for each batch of range(`rows`), in order.

        Raises:
            torch.OutOfMemoryError: a single row is too much. Other errors of `work` pass through.
        """
        done = 0
        while done < rows:
            batch = slice(done, min(rows, done + self.batch_size))
            results = self._attempt(work, batch)
            if not results:
                self.batch_size = max(1, (batch.stop - batch.start) // 2)
                free_memory()
                log.show_error(
                    f"[eval] out of memory in {self._what}: it goes on with {self.batch_size} rows at a time"
                )
                continue
            yield results[0]
            done = batch.stop

    def _attempt(self, work: Callable[[slice], T], batch: slice) -> list[T]:
        try:
            return [work(batch)]
        except RuntimeError as error:
            if batch.stop - batch.start == 1 or not ran_out_of_memory(error):
                raise
        return []
