"""One rank of a run: reads the resolved config, trains, and says in status.json how it ended.

Started by the launcher that `launch.command` describes, never by hand; its parent follows it.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from sftplay import log
from sftplay.atomic import locked_if_possible
from sftplay.config.layers import RESOLVED
from sftplay.config.load import load_resolved
from sftplay.errors import SftplayError, machine_refusal
from sftplay.launch.processes import LOST, Death, answer_with_stacks, find_parent, read_state
from sftplay.launch.run_folder import PARENT, RunFolder
from sftplay.log import quiet_libraries
from sftplay.model.libraries import import_unsloth, unneeded
from sftplay.signals import STOP_SIGNALS, StopAtOnce, Stopped, die_with_parent
from sftplay.startup import begin_imports, leave_out
from sftplay.tasks import TASKS

if TYPE_CHECKING:
    from sftplay.train.task import Task
    from sftplay.train.train_run import TrainResult

BUG = 1

BROKEN_CONNECTION = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "ncclRemoteError")
"""Texts of gloo (transport/tcp/pair.cc) and NCCL (ncclResult_t) when the process at the other end died."""

DISAPPEAR_S = 1.0
"""Time that a killed rank may still exist after the end of its connections, by which others notice its death."""


def main(run_folder: str) -> int:
    """Run the task of `run_folder` on this rank; return the exit code that docs/interfaces.md promises."""
    outside = StopAtOnce()
    outside.install()
    die_with_parent()
    parent, above = int(os.environ.get(PARENT, "0")), os.getppid()
    while parent and above > 1 and above != parent:
        above = find_parent(above)
    if parent not in (0, above):  # parent or launcher died before this process could ask to die with them
        return Death.exit_code
    folder = RunFolder(Path(run_folder))
    log.redirect(folder.logs / f"rank{log.rank()}.log")
    answer_with_stacks(folder.logs, log.rank())
    if log.is_main():
        folder.update_status(pid=os.getpid())  # another rank may have failed already, and its reason stays
    try:
        return _work(folder, outside)
    except Stopped:
        return _stop(folder, outside.received)
    except SftplayError as error:
        return _fail_with(folder, error)
    except Exception as error:  # noqa: BLE001 - the worker's end: a bug must reach status.json
        if outside.received:  # a library has turned the signal into an error of its own
            return _stop(folder, outside.received)
        for number in STOP_SIGNALS:  # torchrun stops the others when a rank ends; this one ends anyway
            signal.signal(number, signal.SIG_IGN)
        if lost := find_lost_rank(folder) or find_lost_node(error):
            return end_after_lost_rank(folder, lost)
        if refusal := machine_refusal(error):
            traceback.print_exc()  # into the log
            return _fail_with(folder, refusal)
        return _fail(folder, BUG, cause=f"{type(error).__name__}: {error}", text=traceback.format_exc())


def _work(folder: RunFolder, outside: StopAtOnce) -> int:
    quiet_libraries()
    cfg = load_resolved(folder.path / RESOLVED)
    if cfg.tuning.backend == "unsloth":
        import_unsloth()
    else:
        leave_out(unneeded(cfg))
    from sftplay.train.guards import StopOnSignal, report_full_disk
    from sftplay.train.train_run import refuse_missing_gpu

    run = find_runner(cfg.task_mode)
    refuse_missing_gpu()
    with report_full_disk(folder.path):
        result = run(cfg, folder=folder, stop=StopOnSignal(outside))
    if result.stop_signal:
        return _stop(folder, result.stop_signal, step=result.step)
    spent = {"train_seconds": result.train_seconds, "train_cpu_seconds": result.train_cpu_seconds}
    _finish(folder, "done", code=0, cause="done", step=result.step, **spent)
    return 0


def find_runner(task_mode: str) -> Callable[..., TrainResult]:
    """Return what runs a task, from the resolved config to the saved result: `run_task`, or the task's own `run`."""
    from sftplay.train.run_task import run_task

    task = importlib.import_module(TASKS[task_mode].trainer)
    return task.run if hasattr(task, "run") else partial(run_task, cast("Task", task))


def _stop(folder: RunFolder, number: int, **more: object) -> int:
    name, code = signal.Signals(number).name, 128 + number
    status = folder.read_json("status.json")
    if status.get("state") == "failed":  # the launcher stops the others when a rank has failed
        return int(status["exit_code"]) if log.is_main() else 0
    _finish(folder, "stopped", code=code, cause=name, signal=name, **more)
    after = f" after step {more['step']}" if more else ""
    log.say(f"stopped by {name}{after}; `make resume` continues from the last complete checkpoint")
    # torchrun ends the others when one rank fails, and the main rank may still be writing.
    return code if log.is_main() else 0


def find_lost_rank(folder: RunFolder) -> str:
    """Find a rank of this node that has died and so caused another rank's error; empty when all live."""
    if not is_in_process_group():
        return ""
    ranks = folder.read_json("status.json").get("ranks") or []
    deadline = time.monotonic() + DISAPPEAR_S
    while len(ranks) > 1 and time.monotonic() < deadline:
        for n in log.local_ranks():
            if n < len(ranks) and not read_state(ranks[n]["pid"]):
                return LOST.format(rank=n, pid=ranks[n]["pid"])
        time.sleep(0.02)
    return ""


def is_in_process_group() -> bool:
    """Return whether other ranks may wait for this one."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def find_lost_node(error: Exception) -> str:
    """Return what an error says of a broken connection to another node; empty for other errors."""
    is_alone = len(log.local_ranks()) == log.world_size()
    is_broken = any(sign in str(error) for sign in BROKEN_CONNECTION)
    return "a process on another node died" if is_broken and not is_alone else ""


def end_after_lost_rank(folder: RunFolder, lost: str) -> int:
    """End because another rank has ended, with that rank's reason if it left one; return the exit code."""
    code = folder.read_json("status.json").get("exit_code")
    if code is not None:
        return int(code)
    fix = "`make resume` continues from the last complete checkpoint"
    return _fail_with(folder, Death(lost, where=str(folder.path), fix=fix))


def _fail_with(folder: RunFolder, error: SftplayError) -> int:
    return _fail(folder, error.exit_code, cause=error.what, text=str(error), error=error.as_json())


def _fail(folder: RunFolder, code: int, *, cause: str, text: str, error: dict[str, object] | None = None) -> int:
    """Write why the run has failed, and show it once even if several ranks fail for one reason; return the exit code. A
    bug after another rank's failure is its consequence and goes to this rank's log only.
    """
    status: dict[str, object] = {}
    with locked_if_possible(folder.logs):
        with suppress(OSError):
            status = folder.read_json("status.json")
        first = status.get("exit_code")
        if code == BUG and status.get("state") == "failed" and isinstance(first, int):
            _print_error(text, on_screen=False)
            return first
        is_said = first == code and error in (None, status.get("error"))
        _finish(folder, "failed", code=code, cause=cause, **({"error": error} if error else {}))
    _print_error(text, on_screen=not is_said)
    return code


def _finish(folder: RunFolder, state: str, *, code: int, cause: str, **more: object) -> None:
    # The failing rank may not be the main one: the first rank that fails writes the reason.
    try:
        if log.is_main() or (code and folder.read_json("status.json").get("exit_code") is None):
            folder.update_status(state=state, exit_code=code, **more)
            folder.close_attempt(cause)
    except OSError as error:  # on a full disk only the exit code can tell it
        _print_error(f"{folder.path}: status.json cannot be written ({error})")


def _print_error(text: str, *, on_screen: bool = True) -> None:
    with suppress(OSError):  # the rank's log may lie on a full disk
        sys.stderr.write(text + "\n")
    with suppress(OSError):
        if on_screen:
            log.show_error(text)


if __name__ == "__main__":
    begin_imports()
    raise SystemExit(main(sys.argv[1]))
