"""What every executor offers, and the last step of opening a box."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Protocol

from sftplay.sandbox.executors.bootstrap import first_message, hello_for
from sftplay.sandbox.verdicts.box import Box
from sftplay.sandbox.verdicts.job import Limits


class Executor(Protocol):
    """Opens boxes, for one thread at a time."""

    name: str

    def open(self, limits: Limits) -> Box:
        """A box that stands. It raises `Lost` with `infra` where it does not stand."""

    def close(self) -> None:
        """End what is kept running between boxes."""


def start_box(
    ours: socket.socket, output: int, *, limits: Limits, kill: Callable[[], None], user: int, folder: str
) -> Box:
    """The box at the other end of a socket, once it has become `user` (0: it stays who it is) in `folder`.

    Raises:
        Lost: `infra`, it did not start.
    """
    box = Box(ours, output, limits=limits, kill=kill)
    try:
        box.send_first(first_message(hello_for(limits, user=user, folder=folder)))
        box.wait_ready()
    except BaseException:
        box.close()
        raise
    return box
