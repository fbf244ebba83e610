"""Worker processes that work through a list and return the outcomes in order.

They are spawned, not forked, so they hold neither torch nor the caller's memory. They end with the caller."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from sftplay.errors import MachineError
from sftplay.signals import die_with_parent

T = TypeVar("T")
W = TypeVar("W")

SHARED_SIGNALS = (signal.SIGINT, signal.SIGUSR1)
"""Signals that a terminal or a scheduler sends to all processes; only the parent answers them."""


def work_through(
    pieces: Iterable[W],
    function: Callable[[W], T],
    *,
    processes: int,
    killed: MachineError,
    initializer: Callable[..., None] | None = None,
    initargs: tuple[Any, ...] = (),
) -> Generator[T]:
    """Yield `function` of each piece, in order; pieces are read only a little ahead. Close it to end its processes.

    Each process calls `initializer(*initargs)` first.
    Raise the MachineError `killed` where one of the processes was killed.
    """
    waiting: deque[Future[T]] = deque()
    pool = ProcessPoolExecutor(
        processes,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(os.getpid(), initializer, initargs),
    )
    try:
        for piece in pieces:
            # This may start a process, which inherits the blocked signals: it could die of one while it imports.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, SHARED_SIGNALS)
            try:
                waiting.append(pool.submit(function, piece))
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            if len(waiting) > 2 * processes:  # enough to keep them busy, few enough to bound memory
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise killed from error
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(parent: int, initializer: Callable[..., None] | None, initargs: tuple[Any, ...]) -> None:
    die_with_parent(parent)
    for stop in SHARED_SIGNALS:  # the parent decides when to stop, and ends this process by SIGTERM
        signal.signal(stop, signal.SIG_IGN)
    if initializer is not None:
        initializer(*initargs)
