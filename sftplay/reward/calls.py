"""Calls a reward in a process of its own, so that a deadline ends even a busy loop in foreign code.

The process starts with the first call, stays for the next ones, and is replaced when it had to be ended.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import isfinite
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from numbers import Number
from pathlib import Path
from typing import Any

from sftplay.errors import ConfigError, SftplayError
from sftplay.reward.table import SHIPPED, is_user_function, load_function
from sftplay.signals import STOP_SIGNALS, die_with_parent

START_S = 120.0
"""How long a process may import what its reward needs; a busy cluster's disk is slow."""

LONGEST_REASON = 500


@dataclass(frozen=True, slots=True)
class RewardValues:
    """The values of one reward for a batch of completions."""

    values: list[float | None]
    """A number for each completion. None: nothing is known."""

    reasons: list[str] = field(default_factory=list)
    """Why values are None, each reason once."""

    verdicts: Sequence[dict[str, Any]] = ()
    """What became of each completion's program; empty for a reward that runs none."""


class RewardWorker:
    """A reward with its options, ready to be called. Close it to end its process."""

    def __init__(self, use: str, options: Mapping[str, Any], *, deadline_s: float) -> None:
        """`use` is a name of `SHIPPED`, or a user's function. A shipped reward has `deadline_s` for each completion, a
        user's function for each batch."""
        self.use, self.options, self.deadline_s = use, dict(options), deadline_s
        self._takes_batch = is_user_function(use)
        self._process: Any = None
        self._pipe: Connection | None = None
        self._at_exit: Finalize | None = None
        self._is_ready = self._is_over = False

    def __call__(self, completions: Sequence[Any], /, **columns: Any) -> RewardValues:
        """Score the completions; `columns` are aligned with them."""
        if self._takes_batch:
            return self._whole(completions, columns)
        scores = RewardValues([])
        for at in range(len(completions)):
            one = self._whole(completions[at : at + 1], {name: value[at : at + 1] for name, value in columns.items()})
            scores.values.extend(one.values)
            scores.reasons.extend(reason for reason in one.reasons if reason not in scores.reasons)
        return scores

    def start(self) -> None:
        """Start its process, if none runs, without waiting for it.

        The process is a new interpreter: nothing of this one is forked, so CUDA may be in use here. Signals that stop a
        run do not end it: the run wants the values of the step that it is in.
        """
        if self._pipe is not None:
            return
        context = multiprocessing.get_context("spawn")
        ours, child_end = context.Pipe()
        named = {"options": self.options, "parent": os.getpid()}
        process = context.Process(
            target=_serve, args=(child_end, self.use), kwargs=named, daemon=True, name=f"reward {self.use}"
        )
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # it inherits that until it can ignore them
        try:
            process.start()
            self._process = process
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        child_end.close()
        self._pipe, self._is_ready = ours, False
        # At its exit this interpreter sends SIGTERM and waits for what it has started; the process ignores SIGTERM.
        self._at_exit = Finalize(self, kill_group, args=(process,), exitpriority=0)

    def stop(self) -> None:
        """End its process from another thread than the one that may wait for it; no other process follows."""
        self._is_over = True
        if self._process is not None:
            kill_group(self._process)

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            kill_group(self._process)
        if self._at_exit is not None:
            self._at_exit.cancel()
        if self._process is not None:
            self._process.join()
            self._process.close()
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = self._at_exit = None

    def wait_ready(self) -> Connection:
        """Return the pipe to a process that is ready. Raise SftplayError where the reward cannot be loaded (a name is
        wrong, or a library is missing), TimeoutError where it did not start in time.
        """
        self.start()
        assert self._pipe is not None
        if self._is_ready:
            return self._pipe
        problem: Exception | None
        try:
            has_started = self._pipe.poll(START_S)
            problem = self._pipe.recv() if has_started else TimeoutError(f"did not start within {START_S:g} s")
        except (EOFError, OSError):
            what = f"{self.use!r} cannot be loaded: its process ended"
            fix = "import it by hand: something in it ends the process"
            problem = ConfigError(what, where="rewards", fix=fix)
        if problem is not None:
            self.close()
            raise problem
        self._is_ready = True
        return self._pipe

    def _whole(self, completions: Sequence[Any], columns: Mapping[str, Any]) -> RewardValues:
        """Score all of them in one call: each gets a number, or none of them does."""
        n = len(completions)
        if self._is_over:
            return RewardValues([None] * n, ["it was ended"])
        try:
            pipe = self.wait_ready()
            pipe.send({**columns, "completions": list(completions)})
            if not pipe.poll(self.deadline_s):
                self.close()
                return RewardValues([None] * n, [f"took longer than {self.deadline_s:g} s"])
            values: RewardValues = pipe.recv()
        except TimeoutError as error:
            return RewardValues([None] * n, [str(error)])
        except (EOFError, OSError):
            self.close()
            return RewardValues([None] * n, ["its process died"])
        return values


def kill_group(process: Any) -> None:
    """End a reward's process and the processes that it has started, unless they have left its group."""
    with suppress(OSError):  # it is reaped already: its number may be another's now
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()


def check_values(answer: Any, n: int) -> RewardValues:
    """Read a reward's answer: finite numbers pass as plain floats, everything else is None with its reason.

    >>> check_values([1, None, float("nan")], 3).reasons
    ['returned None', 'returned nan, which is no finite number']
    """
    as_list = getattr(answer, "tolist", None)  # of a tensor or an array
    values = as_list() if as_list else answer
    if not isinstance(values, list | tuple) or len(values) != n:
        said = f"{len(values)} values" if isinstance(values, list | tuple) else f"a {type(values).__name__}"
        return RewardValues([None] * n, [f"returned {said} for {n} completions"])
    checked = RewardValues([])
    for value in values:
        try:
            found = float(value) if isinstance(value, Number) or hasattr(value, "item") else repr(value)
        except Exception as error:  # noqa: BLE001 - an object of foreign code
            found = f"{type(value).__name__} ({type(error).__name__})"
        number = found if isinstance(found, float) and isfinite(found) else None
        checked.values.append(number)
        reason = "returned None" if value is None else f"returned {found}, which is no finite number"[:LONGEST_REASON]
        if number is None and reason not in checked.reasons:
            checked.reasons.append(reason)
    return checked


def _serve(pipe: Connection, use: str, *, options: dict[str, Any], parent: int) -> None:
    die_with_parent(parent)
    for number in STOP_SIGNALS:  # the parent decides when to stop
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    os.setpgid(0, 0)
    os.dup2(2, 1)  # what the function prints is no output of the command
    pid = os.getpid()
    with suppress(EOFError, OSError):  # the parent has left
        try:
            function = load_function(use) if is_user_function(use) else SHIPPED[use].load()
        except SftplayError as error:
            pipe.send(error)
            return
        pipe.send(None)
        while True:
            answer = _answer(function, {**pipe.recv(), **options})  # no column replaces an option
            if os.getpid() != pid:
                os._exit(0)  # the function forked: two processes would answer
            pipe.send(answer)


def _answer(function: Callable[..., Any], given: dict[str, Any]) -> RewardValues:
    n = len(given["completions"])
    try:
        answer = function(**given)
    except SftplayError as error:
        return RewardValues([None] * n, [str(error)[:LONGEST_REASON]])
    except BaseException as error:  # noqa: BLE001 - a border to foreign code, which may raise SystemExit
        said = f"raised {type(error).__name__}: {error}"[:LONGEST_REASON]
        # With the line of the user's file; lines of the kit's own code say nothing.
        frames, package = traceback.extract_tb(error.__traceback__), str(Path(__file__).parents[1])
        foreign = [frame for frame in frames if not frame.filename.startswith(package)]
        lines = [frame.lineno for frame in foreign if frame.filename == foreign[0].filename]
        place = f" ({Path(foreign[0].filename).name}:{lines[-1]})" if frames[-1] in foreign and lines else ""
        return RewardValues([None] * n, [f"{said}{place}"])
    return check_values(answer, n)
