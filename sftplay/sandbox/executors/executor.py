"""What every executor offers, and the first and the last step of opening a box."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol

from sftplay.sandbox.executors.bootstrap import Arrival, first_message, hello_for
from sftplay.sandbox.verdicts.box import Box, Lost, Pipes
from sftplay.sandbox.verdicts.job import Limits


class Executor(Protocol):
    """Opens boxes, for one thread at a time."""

    name: str

    def open(self, limits: Limits) -> Box:
        """A box that stands. It raises `Lost` with `infra` where it does not stand."""

    def renew(self) -> bool:
        """True where what was kept running has died since the last time: a program may not be at fault."""

    def close(self) -> None:
        """End what is kept running between boxes."""


@contextmanager
def new_pipes() -> Iterator[tuple[Pipes, socket.socket, int]]:
    """Our ends of the pipes to a new box, then the box's: its socket, and where its output goes.

    The box's ends are closed here at the end, and ours too where nothing could be started.

    Raises:
        Lost: `infra`, the machine refused: no such program, no more processes, no more open files.
    """
    with ExitStack() as ours, ExitStack() as theirs:
        try:
            near, far = socket.socketpair()
            ours.callback(near.close)
            theirs.callback(far.close)
            reading, writing = os.pipe()
            ours.callback(os.close, reading)
            theirs.callback(os.close, writing)
            yield Pipes(near.fileno(), None, reading), far, writing
        except OSError as error:
            raise Lost("infra", f"the box did not start: {error}") from error
        ours.pop_all()
        near.detach()


def start_box(
    pipes: Pipes,
    *,
    limits: Limits,
    kill: Callable[[], None],
    arrival: Arrival,
    is_cut: Callable[[], bool] = lambda: False,
) -> Box:
    """The box at the other end of the pipes, once the program inside has arrived.

    Raises:
        Lost: `infra`, it did not start.
    """
    box = Box(pipes, limits=limits, kill=kill, is_cut=is_cut)
    try:
        box.send_first(first_message(hello_for(limits, arrival)))
    except BaseException:
        box.close()
        raise
    return wait_for_box(box)


def wait_for_box(box: Box) -> Box:
    """The box as soon as it stands.

    Raises:
        Lost: `infra`, it did not start.
    """
    try:
        box.wait_ready()
    except BaseException:
        box.close()
        raise
    return box
