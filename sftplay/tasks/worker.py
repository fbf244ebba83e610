"""One rank of a run: reads the resolved config, trains, and says in status.json how it ended.

Started by the launcher that `launch.command` describes, never by hand; its parent follows it.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, cast

from sftplay import log
from sftplay.config.load import load_resolved
from sftplay.errors import SftplayError
from sftplay.launch.command.command import PARENT
from sftplay.launch.run_folder import RESOLVED, RunFolder
from sftplay.launch.supervise.exit_cause import Death
from sftplay.launch.supervise.processes import parent_of, state_of
from sftplay.launch.supervise.stacks import answer_with_stacks
from sftplay.log import quiet_libraries
from sftplay.model.unsloth import import_first
from sftplay.signals import STOP_SIGNALS, StopAtOnce, Stopped, die_with_parent
from sftplay.tasks import TASKS

if TYPE_CHECKING:
    from sftplay.tasks.run.task import Task

BUG = 1

BROKEN = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "ncclRemoteError")
"""What gloo (transport/tcp/pair.cc) and NCCL (ncclResult_t) say where the process at the other end is not there."""

GOING_S = 1.0
"""How long a rank that was killed may take to disappear behind the end of its connections, by which others notice."""


def main(run_folder: str) -> int:
    """Run the task of `run_folder` on this rank; the exit code that docs/interfaces.md promises."""
    outside = StopAtOnce()
    outside.install()
    die_with_parent()
    if is_orphan():
        return Death.exit_code
    folder = RunFolder(Path(run_folder))
    log.redirect(folder.logs / f"rank{log.rank()}.log")
    answer_with_stacks(folder.logs, log.rank())
    if log.is_main():
        folder.update_status(state="running", pid=os.getpid(), exit_code=None, signal=None, error=None)
    try:
        return _work(folder, outside)
    except Stopped:
        return _stop(folder, outside.received)
    except SftplayError as error:
        return _fail(folder, error.exit_code, (error.what, str(error)), error=error.as_json())
    except Exception as error:  # noqa: BLE001 - the worker's end: a bug must reach status.json
        if outside.received:  # some library has made its own error of it
            return _stop(folder, outside.received)
        for each in STOP_SIGNALS:  # torchrun stops those whose neighbour has ended; this one ends anyway
            signal.signal(each, signal.SIG_IGN)
        if gone := gone_rank(folder) or lost_node(error):
            return end_after_lost_rank(folder, gone)
        return _fail(folder, BUG, (f"{type(error).__name__}: {error}", traceback.format_exc()))


def _work(folder: RunFolder, outside: StopAtOnce) -> int:
    quiet_libraries()
    cfg = load_resolved(folder.path / RESOLVED)
    if cfg.tuning.backend == "unsloth":
        import_first()
    from sftplay.monitor.disk import report_full_disk
    from sftplay.monitor.guards import StopOnSignal
    from sftplay.tasks.run.run_task import run_task

    task = cast("Task", importlib.import_module(TASKS[cfg.task_mode]))
    with report_full_disk(folder.path):
        outcome = run_task(task, cfg, folder, StopOnSignal(outside))
    if outcome.stop_signal:
        return _stop(folder, outcome.stop_signal, step=outcome.step)
    spent = {"train_seconds": outcome.train_seconds, "train_cpu_seconds": outcome.train_cpu_seconds}
    _finish(folder, "done", 0, cause="done", step=outcome.step, **spent)
    return 0


def _stop(folder: RunFolder, number: int, **more: object) -> int:
    name, code = signal.Signals(number).name, 128 + number
    told = folder.read_json("status.json")
    if told.get("state") == "failed":  # the launcher stops those whose neighbour has failed
        return int(told["exit_code"]) if log.is_main() else 0
    _finish(folder, "stopped", code, cause=name, signal=name, **more)
    after = f" after step {more['step']}" if more else ""
    log.say(f"stopped by {name}{after}; `make resume` continues from the last complete checkpoint")
    # torchrun ends the others when one rank fails, and the main one may still be writing.
    return code if log.is_main() else 0


def is_orphan() -> bool:
    """True when parent or launcher died before this process had tied its life to theirs."""
    parent, above = int(os.environ.get(PARENT, "0")), os.getppid()
    while parent and above > 1 and above != parent:
        above = parent_of(above)
    return parent not in (0, above)


def gone_rank(folder: RunFolder) -> str:
    """Which rank of this node has died, when an error of another one follows from that; empty when all live."""
    ranks = folder.read_json("status.json").get("ranks") or []
    deadline = time.monotonic() + GOING_S
    while len(ranks) > 1 and time.monotonic() < deadline:
        here = [(n, ranks[n]["pid"]) for n in log.local_ranks() if n < len(ranks)]
        gone = [f"rank {n} (process {pid}) has gone" for n, pid in here if not state_of(pid)]
        if gone:
            return gone[0]
        time.sleep(0.02)
    return ""


def lost_node(error: Exception) -> str:
    """What is said where an error tells of a connection to another node that has broken; empty otherwise."""
    is_alone = len(log.local_ranks()) == log.world_size()
    return "" if is_alone or not any(sign in str(error) for sign in BROKEN) else "a process on another node has gone"


def end_after_lost_rank(folder: RunFolder, gone: str) -> int:
    """End because another rank has; the reason is that one's, if it left one."""
    told = folder.read_json("status.json").get("exit_code")
    if told is not None:
        return int(told)
    death = Death(gone, where=str(folder.path), fix="`make resume` continues from the last complete checkpoint")
    return _fail(folder, death.exit_code, (gone, str(death)), error=death.as_json())


def _fail(folder: RunFolder, code: int, words: tuple[str, str], error: dict[str, object] | None = None) -> int:
    """Leave why the run has failed, and show it once, as ranks often fail for the same reason; the exit code.

    `words` are the cause in one line, and all there is to say. A bug behind another rank's failure is taken for its
    consequence: it goes to this rank's log only.
    """
    status: dict[str, object] = {}
    with _one_at_a_time(folder.logs):
        with suppress(OSError):
            status = folder.read_json("status.json")
        told = status.get("exit_code")
        if code == BUG and status.get("state") == "failed" and isinstance(told, int):
            _print_error(words[1], on_screen=False)
            return told
        is_said = told == code and error in (None, status.get("error"))
        _finish(folder, "failed", code, cause=words[0], **({"error": error} if error else {}))
    _print_error(words[1], on_screen=not is_said)
    return code


@contextmanager
def _one_at_a_time(logs: Path) -> Iterator[None]:
    """Hold the folder `logs` among the ranks of this node, where it is still there and its file system can."""
    with ExitStack() as held:
        with suppress(OSError):
            handle = os.open(logs, os.O_RDONLY)
            held.callback(os.close, handle)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _finish(folder: RunFolder, state: str, code: int, *, cause: str, **more: object) -> None:
    # With several ranks the failing one may not be the main one: whoever fails first leaves the reason.
    try:
        if log.is_main() or (code and folder.read_json("status.json").get("exit_code") is None):
            folder.update_status(state=state, exit_code=code, **more)
            folder.close_attempt(cause)
    except OSError as error:  # on a full disk the exit code alone must tell it
        _print_error(f"{folder.path}: status.json cannot be written ({error})")


def _print_error(text: str, *, on_screen: bool = True) -> None:
    with suppress(OSError):  # the rank's log may lie on a full disk
        sys.stderr.write(text + "\n")
    with suppress(OSError):
        if on_screen:
            log.show_error(text)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
