"""Boxes by bubblewrap that start in a few milliseconds: one box waits with Python started, and forks for each program.

Each program gets namespaces of its own inside that box, of users and processes, and a folder to write to.
The network and the machine's files were out of reach before.
"""

from __future__ import annotations

import marshal
import select
import socket
import subprocess
from collections.abc import Sequence
from itertools import count

from sftplay.sandbox.executors import bootstrap
from sftplay.sandbox.executors.bwrap import WORK, Bwrap, box_arguments, inner_interpreter
from sftplay.sandbox.executors.executor import new_pipes, start_box
from sftplay.sandbox.inside import server
from sftplay.sandbox.verdicts.box import START_S, Box, Lost, is_ready
from sftplay.sandbox.verdicts.job import Limits


class WarmBwrap(Bwrap):
    """Forks a box for each program out of one that is kept."""

    def __init__(self, packages: Sequence[str] = ()) -> None:
        super().__init__(packages)
        self._numbers = count()
        self._process: subprocess.Popen[bytes] | None = None
        self._orders: socket.socket | None = None
        self._has_died = self._is_fresh = False

    def open(self, limits: Limits) -> Box:
        """Open a box that stands.

        Raises:
            Lost: `infra`, the server or the box did not start, twice.
        """
        if self._is_fresh:
            return super().open(limits)
        try:
            return self._fork(limits)
        except Lost:
            self._give_up()
            return self._fork(limits)

    def _fork(self, limits: Limits) -> Box:
        orders = self._orders or self._start()
        number = next(self._numbers)
        hello = bootstrap.make_hello(limits, folder=WORK, filter=self._filter)
        with new_pipes() as (pipes, far, writing):
            socket.send_fds(orders, [marshal.dumps(("start", number, hello))], [far.fileno(), writing])
        return start_box(Box(pipes, limits=limits, kill=lambda: self._kill(number, orders)))

    def _kill(self, number: int, orders: socket.socket) -> None:
        """Have the server end a program. A server that does not answer is ended itself, and all programs with it."""
        if orders is not self._orders:
            return  # that server is gone, and all its programs with it
        try:
            orders.send(marshal.dumps(("kill", number, None)))
            if not is_ready(orders.fileno(), select.POLLIN, within_s=60.0) or orders.recv(16) != b"gone":
                self._give_up()
        except OSError:
            self._give_up()

    def _give_up(self) -> None:
        """End a server that does not answer; the next box starts another."""
        self._has_died = True
        self.close()

    def _start(self) -> socket.socket:
        orders, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        user = bootstrap.unused_user()
        argv = [
            self._program, *box_arguments(Limits(), self._packages, is_root=user != 0, has_proc=True), "--",
            *bootstrap.boot_command(inner_interpreter(), far.fileno()),
        ]  # fmt: skip
        self._orders = orders
        hello = bootstrap.make_hello(Limits(), folder=WORK, user=user)
        try:
            with far:
                self._process = subprocess.Popen(
                    argv, env=self._environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL, cwd="/", pass_fds=(far.fileno(),), start_new_session=True,
                )  # fmt: skip
            orders.sendall(bootstrap.first_message(hello, program=server))
            if not is_ready(orders.fileno(), select.POLLIN, within_s=START_S) or orders.recv(16) != b"ready":
                raise OSError("it did not start")
        except OSError as error:
            self.close()
            raise Lost("infra", f"the server: {error}") from error
        return orders

    def renew(self) -> bool:
        """True where the server has died since the last time.

        The next boxes need none, so that the second verdict hangs on nothing but its program; later ones start another.
        """
        if self._process is not None and self._process.poll() is not None:
            self._give_up()
        self._is_fresh, self._has_died = self._has_died, False
        return self._is_fresh

    def close(self) -> None:
        """End the server, and with it all that came of it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._orders is not None:
            self._orders.close()
        self._process = self._orders = None
