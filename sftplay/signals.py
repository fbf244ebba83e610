"""Ends a process at a stop signal, and together with its parent: a killed launcher leaves no process behind."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)  # signals that end a run in good order

ECHO_S = 10.0
"""SLURM sends the end of a job to each of its processes, and a parent forwards it too. Within this time after the first
stop signal of a job, others are echoes of it."""

ECHO_OF_MAKE_S = 20.0
"""make forwards a SIGTERM to its recipe (commands.c, fatal_error_signal) after the whole process group, this process
included, has got it. The second one arrives within this time, on a busy machine too: taken for a signal of the user it
would kill the workers while they write their last checkpoint. Only one signal counts as an echo."""


class Stopped(BaseException):
    """A stop signal came outside a step. It is no `Exception`, so that no library catches it as one of its own."""


class Echoes:
    """Tells echoes of the first stop signal from a second one: those of a job of SLURM, and make's to its recipe."""

    def __init__(self, *, of_make: bool = False) -> None:
        """With `of_make` this process may be make's recipe, and is not below one."""
        self._is_in_job, self._is_recipe = "SLURM_JOB_ID" in os.environ, of_make and "MAKELEVEL" in os.environ
        self.are_possible = self._is_in_job or self._is_recipe
        self._until = self._until_of_make = 0.0

    def is_echo(self, number: int = 0) -> bool:
        """True for an echo of the stop signal for which this was called first. Call it once for each signal."""
        now, is_first = time.monotonic(), not self._until
        if is_first:
            self._until = now + ECHO_S
        elif self._is_in_job and now < self._until:
            return True
        is_of_make = number == signal.SIGTERM and now < self._until_of_make
        self._until_of_make = now + ECHO_OF_MAKE_S if is_first and self._is_recipe and number == signal.SIGTERM else 0.0
        return is_of_make


class StopAtOnce:
    """Raises `Stopped` at a stop signal. It is used before a run's first step and after its last."""

    def __init__(self, *, of_make: bool = False) -> None:
        self.received = 0
        """The signal that came, 0 for none. It is kept for the case that a library swallows the exception."""
        self.echoes = Echoes(of_make=of_make)

    def install(self) -> None:
        """Handle the stop signals of this process."""
        catch_signals(self.on_signal)

    def on_signal(self, number: int, _frame: Any) -> None:
        if self.echoes.is_echo(number):
            return
        if self.received:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.received = number
        if not self.echoes.are_possible:
            for stop in STOP_SIGNALS:  # a second signal ends the process at once, even inside foreign code
                signal.signal(stop, signal.SIG_DFL)
        raise Stopped(signal.Signals(number).name)


def catch_signals(handler: Callable[[int, Any], None]) -> dict[int, Any]:
    """Install `handler` for the stop signals; the previous handlers. A hang-up that nohup ignores stays ignored."""
    ignores_hangup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    wanted = [stop for stop in STOP_SIGNALS if not (stop == signal.SIGHUP and ignores_hangup)]
    return {stop: signal.signal(stop, handler) for stop in wanted}


@contextmanager
def catching(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """`catch_signals` until the block ends; then the previous handlers come back."""
    previous = catch_signals(handler)
    try:
        yield
    finally:
        for number, earlier in previous.items():
            signal.signal(number, earlier)


class Forwarder:
    """Forwards the first stop signal to a process, also one that came before the process was started."""

    def __init__(
        self,
        forward: Callable[[subprocess.Popen[bytes], int], None],
        *,
        at_second: Callable[[subprocess.Popen[bytes]], None] = lambda _: None,
        is_echo: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self.received: list[int] = []
        """The stop signals that came, without echoes."""
        self._forward, self._at_second, self._is_echo = forward, at_second, is_echo
        self._process: subprocess.Popen[bytes] | None = None

    def installed(self) -> AbstractContextManager[None]:
        """Handle the stop signals; the previous handlers come back at the end."""
        return catching(self.on_signal)

    def attach(self, process: subprocess.Popen[bytes]) -> None:
        """Forward to this process from now on."""
        self._process = process
        if self.received:
            self._forward(process, self.received[0])

    def on_signal(self, number: int, _frame: Any) -> None:
        if self._is_echo(number):
            return
        self.received.append(number)
        if self._process and len(self.received) == 1:
            self._forward(self._process, number)
        elif self._process:
            self._at_second(self._process)


def die_with_parent(parent: int | None = None, *, number: int = signal.SIGKILL) -> None:
    """Ask Linux to send this process the signal `number` when its parent dies (prctl(2), PR_SET_PDEATHSIG); elsewhere
    nothing happens.

    None for the `parent`'s pid means that the parent cannot have died before this call.
    """
    if sys.platform != "linux":
        return
    parent = parent or os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # the parent died before the request took effect
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Let what the processes below this one leave behind become its children (prctl(2)); elsewhere nothing happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)


class TiedPopen(subprocess.Popen[Any]):
    """A process that Linux kills when this one dies."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "preexec_fn": partial(die_with_parent, os.getpid())})


def popen_tied(
    argv: Sequence[str], *, output: int | IO[bytes], env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.Popen[bytes]:
    """Start a process that Linux kills when this one dies. `env` is added to this process's environment.

    It has no input; its standard output and error go to `output`. A terminal's Ctrl-C does not reach its own session.
    """
    return TiedPopen(
        argv, env={**os.environ, **(env or {})}, cwd=cwd, stdin=subprocess.DEVNULL, stdout=output,
        stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
