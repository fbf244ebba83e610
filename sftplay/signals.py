"""Ends a process at a stop signal, and together with its parent: a killed launcher leaves no process behind."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)  # signals that end a run in good order

ECHO_S = 10.0
"""SLURM sends the end of a job to each of its processes, and a parent forwards it too. Within this time after the first
stop signal of a job, others are echoes of it."""


class Stopped(BaseException):
    """A stop signal came outside a step. It is no `Exception`, so that no library catches it as one of its own."""


class Echoes:
    """Tells echoes of the first stop signal from a second one. Outside a job of SLURM no signal has an echo."""

    def __init__(self) -> None:
        self.are_possible = "SLURM_JOB_ID" in os.environ
        self._until = 0.0

    def is_echo(self) -> bool:
        """True for an echo of the stop signal for which this was called first. Call it once for each signal."""
        now, is_first = time.monotonic(), not self._until
        if is_first:
            self._until = now + ECHO_S
        return self.are_possible and not is_first and now < self._until


class StopAtOnce:
    """Raises `Stopped` at a stop signal. It is used before a run's first step and after its last."""

    def __init__(self) -> None:
        self.received = 0
        """The signal that came, 0 for none. It is kept for the case that a library swallows the exception."""
        self.echoes = Echoes()

    def install(self) -> None:
        """Handle the stop signals of this process."""
        catch_signals(self._on_signal)

    def _on_signal(self, number: int, _frame: Any) -> None:
        if self.echoes.is_echo():
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

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle the stop signals; the previous handlers come back at the end."""
        previous = catch_signals(self.on_signal)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

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


def die_with_parent(parent: int | None = None) -> None:
    """Ask Linux to kill this process when its parent dies (prctl(2), PR_SET_PDEATHSIG); elsewhere nothing happens.

    None for the `parent`'s pid means that the parent cannot have died before this call.
    """
    if sys.platform != "linux":
        return
    parent = parent or os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the request took effect
        os.kill(os.getpid(), signal.SIGKILL)


def outlive_parent() -> None:
    """Take `die_with_parent` back."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, 0)


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
