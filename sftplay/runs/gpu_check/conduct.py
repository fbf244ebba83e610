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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sftplay import log
from sftplay.atomic import read_object, write_text
from sftplay.launch.supervise.processes import end_launch
from sftplay.machine.probe import Machine, probe
from sftplay.runs.gpu_check.check import Broken, Check, NotPossible, Place
from sftplay.signals import die_with_parent, popen_tied

ROW = "sftplay.runs.gpu_check.table"
FOUND, OUTPUT = "found.json", "output.txt"

KEPT_LINES = 30
"""Of a failed check's output, the last lines that go into the JSON file."""


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
            own = scratch / str(number)
            note(run_apart(check, own, module=module, shared=scratch / "shared"))
            shutil.rmtree(own, ignore_errors=True)


def run_apart(check: Check, folder: Path, *, module: str, shared: Path) -> Row:
    """Run one check in a process of its own, which is killed with all that it has started when its time is up."""
    for each in (folder, shared):
        each.mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, "-m", ROW, module, check.name, str(folder), str(shared)]
    began = time.monotonic()
    with (folder / OUTPUT).open("wb") as output:
        process = popen_tied(argv, output=output, env={"TMPDIR": str(folder)})  # what a killed check leaves goes too
        try:
            code: int | None = process.wait(check.limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:  # where it has died, the kernel ends what it had started
                end_launch(process.pid)
                process.wait()
    seconds = round(time.monotonic() - began, 1)
    found = read_object(folder / FOUND)
    if code == 0 and found:
        return Row(
            **{**found, "name": check.name, "seconds": seconds, "output": _read_last_lines(folder, found["state"])}
        )
    lines = _lines(folder)
    return Row(
        name=check.name,
        state="failed",
        why=_describe_end(code, check.limit_s, last_line=lines[-1] if lines else ""),
        seconds=seconds,
        output=tuple(lines[-KEPT_LINES:]),
    )


def serve(check: Check, place: Place) -> int:
    """The process of one check: run it and write what it has found. Any other error ends the process as it would."""
    die_with_parent()
    try:
        found: dict[str, Any] = {"state": "ok", "figure": check.run(place)}
    except NotPossible as reason:
        found = {"state": "not_possible", "why": str(reason)}
    except Broken as reason:
        found = {"state": "failed", "why": str(reason)}
    write_text(place.folder / FOUND, json.dumps({**found, "details": place.details}, default=str))
    return 0


def _describe_end(code: int | None, limit_s: float, *, last_line: str) -> str:
    if code is None:
        return f"no end within {limit_s:g} s"
    if code == -signal.SIGKILL:
        return "killed by SIGKILL, as the kernel does where memory runs out"
    ending = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    return f"{ending}: {last_line[:300]}" if last_line else ending


def _read_last_lines(folder: Path, state: str) -> tuple[str, ...]:
    return tuple(_lines(folder)[-KEPT_LINES:]) if state == "failed" else ()


def _lines(folder: Path) -> list[str]:
    text = (folder / OUTPUT).read_text(encoding="utf-8", errors="replace")
    return [line for line in text.splitlines() if line.strip()]


def new_place(folder: Path, shared: Path) -> Place:
    """The place of a check in these folders, on this machine."""
    return Place(probe(), folder, shared)


def describe_machine(machine: Machine) -> dict[str, Any]:
    """What the table says of the machine: card, driver, versions."""
    return {
        "card": ", ".join(gpu.name for gpu in machine.gpus) or None,
        "driver": machine.driver or None,
        "cuda": ".".join(map(str, machine.cuda_driver)) if machine.cuda_driver else None,
        "cores": machine.cores,
        "system": machine.system,
        "versions": {"python": machine.python, **machine.libraries},
    }
