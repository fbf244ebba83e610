"""Handle running out of memory: inform all ranks, free memory, and explain the failure.

`ExactBatchMixin` runs the rows again (`train.exact_batch`).
"""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from sftplay import log
from sftplay.errors import MachineError, ran_out_of_memory, said_of_memory
from sftplay.heartbeat import Heartbeat
from sftplay.units import format_bytes

T = TypeVar("T")


class OutOfMemory(MachineError):
    """Memory ran out in a step that cannot be run again, or for a single row."""

    code = "memory"

    def __init__(self, what: str, *, where: str = "", fix: str = "", batch_size: int | None = None) -> None:
        super().__init__(what, where=where, fix=fix)
        self.batch_size = batch_size
        """Rows of a micro-batch with which the run may continue from its last checkpoint; None when it cannot."""

    def as_json(self) -> dict[str, object]:
        return {**super().as_json(), "batch_size": self.batch_size}


@dataclass(frozen=True)
class Shortage:
    """The place where memory ran out. It holds no tensor, so that the failed attempt's memory can be freed."""

    rows: int
    tokens: int
    """Tokens of the micro-batch, with padding."""

    phase: str
    held_bytes: int
    """The most that this process had held until then: in torch's allocator on a GPU, resident on a CPU."""

    reason: str
    """`said_of_memory` of the error."""


class Agreement:
    """Informs all ranks that one of them ran out of memory. Its few bytes are allocated in advance."""

    def __init__(self, device: Any) -> None:
        self._flag = torch.zeros(1, dtype=torch.int32, device=device)

    def all_shortages(self, shortage: Shortage | None, heartbeat: Heartbeat) -> list[Shortage | None]:
        """Return the shortage of every rank, in rank order; empty when no rank has one. Every rank must call it."""
        if log.world_size() == 1:
            return [shortage] if shortage else []
        with heartbeat.within("communication"):
            self._flag.fill_(shortage is not None)
            torch.distributed.all_reduce(self._flag, torch.distributed.ReduceOp.MAX)
            if not int(self._flag):
                return []
        free_memory()
        return gather_objects(shortage, heartbeat)


def gather_objects(item: Any, heartbeat: Heartbeat | None = None) -> list[Any]:
    """Return the `item` of every rank, in rank order. Every rank must call it. The time counts as communication.

    The main rank gets only its own item when the others have ended (`train.run_task.leave_process_group`).
    """
    if log.world_size() == 1 or not torch.distributed.is_initialized():
        return [item]
    items: list[Any] = [None] * log.world_size()
    with heartbeat.within("communication") if heartbeat else nullcontext():
        torch.distributed.all_gather_object(items, item)
    return items


def memory_fields() -> dict[str, int]:
    """Return the bytes that this process holds: on a GPU allocated, reserved and peak, else the peak resident set."""
    if torch.cuda.is_available():
        return {
            "allocated_bytes": torch.cuda.memory_allocated(),
            "reserved_bytes": torch.cuda.memory_reserved(),
            "peak_bytes": torch.cuda.max_memory_allocated(),
        }
    return {"peak_rss_bytes": peak_rss_bytes()}


def peak_rss_bytes() -> int:
    """Return the peak resident memory of this process. The kernel counts bytes on macOS, KiB on other systems."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def held_bytes() -> int:
    """Return the peak memory of this process so far."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else peak_rss_bytes()


def free_memory() -> None:
    """Free the memory that a failed micro-batch left: reference cycles first, then the allocator's blocks."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def describe_shortages(shortages: list[Shortage | None], planned_bytes: int | None) -> str:
    """Describe which ranks ran out of memory and where, with the plan's figure."""
    first = next(shortage for shortage in shortages if shortage)
    failed = ", ".join(str(rank) for rank, shortage in enumerate(shortages) if shortage)
    ranks = f" on rank {failed}" if len(shortages) > 1 else ""
    planned = f", {format_bytes(planned_bytes)} planned" if planned_bytes else ""
    return (
        f"out of memory in {first.phase}{ranks}: {first.rows} rows, {first.tokens} tokens at once; "
        f"{format_bytes(first.held_bytes)} held{planned} ({first.reason})"
    )


class AdaptiveBatches:
    """Processes rows in batches. Each time memory does not suffice for a batch, the size is halved for good.

    For evaluation and sampling, where the size of a batch changes only the speed. With `fix` ranks compute together:
    none may take smaller batches than the others, and `fix` is the advice to the user.
    """

    def __init__(self, batch_size: int, activity: str, *, fix: str = "") -> None:
        self.batch_size = batch_size
        self._activity, self._fix = activity, fix

    def map(self, rows: int, compute: Callable[[slice], T]) -> Iterator[T]:
        """Yield the result of `compute` for each batch of range(`rows`), in order.

        Raises:
            OutOfMemory: a batch of several ranks together is too much.
            RuntimeError: a single row is too much. Other errors of `compute` pass through.
        """
        start = 0
        while start < rows:
            batch = slice(start, min(rows, start + self.batch_size))
            if results := self._attempt(compute, batch):
                yield results[0]
                start = batch.stop
                continue
            self._halve(batch.stop - batch.start)

    def retry(self, rows: int, compute: Callable[[int], T]) -> T:
        """Return the result of `compute` for the size of a batch, where it batches by itself and can be called again.

        Raises:
            OutOfMemory, RuntimeError: as `map`.
        """
        while True:
            size = min(rows, self.batch_size)
            if results := self._attempt(lambda part: compute(part.stop), slice(0, size)):
                return results[0]
            self._halve(size)

    def _halve(self, rows: int) -> None:
        self.batch_size = max(1, rows // 2)
        free_memory()
        what = f"out of memory in {self._activity}: it goes on with {self.batch_size} rows at a time"
        log.show_error(f"[memory] {what}")

    def _attempt(self, compute: Callable[[slice], T], batch: slice) -> list[T]:
        """Return a list of the one result; empty when memory ran out. The error and its tensors are released then."""
        try:
            return [compute(batch)]
        except RuntimeError as error:
            if not ran_out_of_memory(error) or (batch.stop - batch.start == 1 and not self._fix):
                raise
            if self._fix:
                rows = f"{batch.stop - batch.start} rows at a time; {format_bytes(held_bytes())} held"
                what = f"out of memory in {self._activity}: {rows} ({said_of_memory(error)})"
                raise OutOfMemory(what, where="training", fix=self._fix) from error
        return []
