"""What every executor offers, and the last step of opening a box."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from sftplay.sandbox.executors.bootstrap import Arrival, first_message, hello_for
from sftplay.sandbox.verdicts.box import Box, Pipes
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


def start_box(pipes: Pipes, *, limits: Limits, kill: Callable[[], None], arrival: Arrival) -> Box:
    """The box at the other end of the pipes, once the program inside has arrived.

    Raises:
        Lost: `infra`, it did not start.
    """
    box = Box(pipes, limits=limits, kill=kill)
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
