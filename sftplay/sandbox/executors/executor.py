"""What every executor offers, and the first and the last step of opening a box."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from sftplay.sandbox.verdicts.box import Box, Lost, Pipes
from sftplay.sandbox.verdicts.job import Limits


class Executor:
    """Opens boxes, for one thread at a time. Nothing is kept running between boxes unless a subclass does so."""

    name: str

    def open(self, limits: Limits) -> Box:
        """Open a box and wait until it stands. It raises `Lost` with `infra` where it does not."""
        raise NotImplementedError

    def renew(self) -> bool:
        """Say whether what is kept running has died since the last time: a program may not be at fault."""
        return False

    def close(self) -> None:
        """End what is kept running between boxes."""


@contextmanager
def new_pipes() -> Iterator[tuple[Pipes, socket.socket, int]]:
    """Make pipes to a new box: our ends, then the box's socket and where its output goes.

    The box's ends are closed here at the end, and ours too where nothing could be started.

    Raises:
        Lost: `infra`, the machine refused: no such program, no more processes, no more open files.
    """
    with ExitStack() as ours, ExitStack() as the_box:
        try:
            near, far = socket.socketpair()
            ours.callback(near.close)
            the_box.callback(far.close)
            reading, writing = os.pipe()
            ours.callback(os.close, reading)
            the_box.callback(os.close, writing)
            yield Pipes(near.fileno(), None, reading), far, writing
        except OSError as error:
            raise Lost("infra", f"the box did not start: {error}") from error
        ours.pop_all()
        near.detach()


def start_box(box: Box, first_message: bytes = b"") -> Box:
    """Send the box what it waits for, if that is not there yet; return it as soon as it stands.

    Raises:
        Lost: `infra`, it did not start.
    """
    try:
        if first_message:
            box.send_first(first_message)
        box.wait_ready()
    except BaseException:
        box.close()
        raise
    return box
