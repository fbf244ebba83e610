"""Runs checks one after the other, each in a process of its own with a time limit, and keeps what each has found.

A check that hangs, dies or runs out of memory is a row of the table and not the end.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sftplay import log
from sftplay.atomic import read_object, write_text
from sftplay.launch.processes import end_launch
from sftplay.machine.probe import probe
from sftplay.runs.gpu_check.check import Broken, Check, CheckContext, NotPossible
from sftplay.signals import die_with_parent, popen_tied

FOUND = "found.json"


@dataclass(frozen=True, kw_only=True)
class Row:
    """What a check has found."""

    name: str
    state: Literal["ok", "failed", "not_possible"]
    why: str = ""
    figure: str = ""
    seconds: float = 0.0
    details: dict[str, Any] = field(default_factory=dict)
    output: tuple[str, ...] = ()


def conduct(checks: Sequence[Check], scratch: Path, *, module: str, is_fast: bool, note: Callable[[Row], None]) -> None:
    """Run `checks`, from the table CHECKS of `module`, one by one, and hand each row to `note` at once."""
    machine = probe()
    for number, check in enumerate(checks):
        if missing := check.needs(machine):
            note(Row(name=check.name, state="not_possible", why=missing))
        elif check.is_long and is_fast:
            note(Row(name=check.name, state="not_possible", why="left out by FAST=1"))
        else:
            log.status(f"{number + 1} of {len(checks)}: {check.name}", "gpu-check")
            folder = scratch / str(number)
            note(_run_apart(check, folder, module=module, shared=scratch / "shared"))
            shutil.rmtree(folder, ignore_errors=True)


def run_with_limit(argv: Sequence[str], *, env: Mapping[str, str], output: Path, limit_s: float) -> int | None:
    """Run a command to its end and return its exit code; after `limit_s` seconds end all its processes, return None."""
    with output.open("wb") as handle:
        process = popen_tied(argv, output=handle, env=env)
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:  # where it has died, the kernel ends what it had started
                end_launch(process.pid)
                process.wait()


def _run_apart(check: Check, folder: Path, *, module: str, shared: Path) -> Row:
    """Run one check in a separate process, which is killed with all that it has started when its time is up."""
    folder.mkdir(parents=True, exist_ok=True)
    shared.mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, "-m", "sftplay.runs.gpu_check.table", module, check.name, str(folder), str(shared)]
    began, text = time.monotonic(), folder / "output.txt"
    # TMPDIR: what a killed check leaves goes too.
    code = run_with_limit(argv, env={"TMPDIR": str(folder)}, output=text, limit_s=check.limit_s)
    seconds = round(time.monotonic() - began, 1)
    found = read_object(folder / FOUND)
    lines = [line for line in text.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    last_lines = tuple(lines[-30:])
    if code == 0 and found:
        last_lines = last_lines if found["state"] == "failed" else ()
        return Row(**{**found, "name": check.name, "seconds": seconds, "output": last_lines})
    if code is None:
        why = f"no end within {check.limit_s:g} s"
    elif code == -signal.SIGKILL:
        why = "killed by SIGKILL, as the kernel does where memory runs out"
    else:
        why = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        why += f": {lines[-1][:300]}" if lines else ""
    return Row(name=check.name, state="failed", why=why, seconds=seconds, output=last_lines)


def serve(check: Check, context: CheckContext) -> int:
    """Run one check in its process and write what it has found. Any other error ends the process as it would."""
    die_with_parent()
    try:
        found: dict[str, Any] = {"state": "ok", "figure": check.run(context)}
    except NotPossible as reason:
        found = {"state": "not_possible", "why": str(reason)}
    except Broken as reason:
        found = {"state": "failed", "why": str(reason)}
    write_text(context.folder / FOUND, json.dumps({**found, "details": context.details}, default=str))
    return 0
