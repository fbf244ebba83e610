"""Runs checks one after the other, each in a process of its own with a time limit, and keeps what each has found.

A check that hangs, dies or runs out of memory is a row of the table and not the end. As a program, this module is the
process of one check.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from sftplay import log
from sftplay.atomic import read_object, write_text
from sftplay.launch.processes import run_with_limit
from sftplay.machine.probe import Machine, probe
from sftplay.runs.gpu_check.check import Broken, Check, CheckContext, NotPossible
from sftplay.signals import die_with_parent
from sftplay.startup import begin_imports

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


def _run_apart(check: Check, folder: Path, *, module: str, shared: Path) -> Row:
    """Run one check in a separate process, which is killed with all that it has started when its time is up."""
    folder.mkdir(parents=True, exist_ok=True)
    shared.mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, "-m", "sftplay.runs.gpu_check.conduct", module, check.name, str(folder), str(shared)]
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


def serve(module: str, name: str, *, folder: Path, shared: Path) -> None:
    """Run the check called `name` of the table CHECKS in `module` and write what it has found.

    Any other error ends the process as it would.
    """
    die_with_parent()
    check = next(check for check in import_module(module).CHECKS if check.name == name)
    context = CheckContext(probe(), folder, shared)
    try:
        found: dict[str, Any] = {"state": "ok", "figure": check.run(context)}
    except NotPossible as reason:
        found = {"state": "not_possible", "why": str(reason)}
    except Broken as reason:
        found = {"state": "failed", "why": str(reason)}
    write_text(folder / FOUND, json.dumps({**found, "details": context.details}, default=str))


JSON_FILE, MARKDOWN_FILE = "gpu-check.json", "gpu-check.md"
STATES = {"ok": "ok", "failed": "FAILED", "not_possible": "not possible here"}


class Table:
    """The rows so far, and the two files in `folder`."""

    def __init__(self, machine: Machine, folder: Path) -> None:
        self.rows: list[Row] = []
        self._folder, self._began, self._date = folder, time.monotonic(), time.strftime("%Y-%m-%d %H:%M")
        self._machine: dict[str, Any] = {
            "card": ", ".join(gpu.name for gpu in machine.gpus) or None,
            "driver": machine.driver or None,
            "cuda": ".".join(map(str, machine.cuda_driver)) if machine.cuda_driver else None,
            "cores": machine.cores,
            "system": machine.system,
            "versions": {"python": machine.python, **machine.libraries},
        }

    def save(self, *rows: Row) -> None:
        """Add the rows and write both files anew."""
        self.rows += rows
        write_text(self._folder / JSON_FILE, json.dumps(self.as_dict(), indent=1, ensure_ascii=False) + "\n")
        write_text(self._folder / MARKDOWN_FILE, self.as_markdown())

    def count(self, state: str) -> int:
        return sum(row.state == state for row in self.rows)

    def summary(self) -> str:
        """Return the last line of the command."""
        counts = ", ".join(f"{self.count(state)} {text}" for state, text in STATES.items())
        return f"{counts}; {time.monotonic() - self._began:.0f} s"

    def as_dict(self) -> dict[str, Any]:
        """Return the content of gpu-check.json."""
        always = ("name", "state", "why", "figure", "seconds")
        rows = [{key: value for key, value in asdict(row).items() if value or key in always} for row in self.rows]
        return {"date": self._date, **self._machine, "rows": rows}

    def as_markdown(self) -> str:
        """Return the content of gpu-check.md."""
        about = self._machine
        versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
        driver = f", driver {about['driver']} (CUDA {about['cuda']})" if about["driver"] else ""
        card = about["card"] or f"no GPU ({about['cores']} CPU cores)"
        lines = [f"{self._date}, {card}{driver}, {about['system']}; {versions}.", ""]
        lines += ["| check | outcome | figure, or why not | seconds |", "| --- | --- | --- | --- |"]
        for row in self.rows:
            text = " ".join((row.figure or row.why).split()).replace("|", "\\|")
            lines.append(f"| {row.name} | {STATES[row.state]} | {text} | {row.seconds:.0f} |")
        return "\n".join(lines) + "\n"


if __name__ == "__main__":
    begin_imports()
    serve(sys.argv[1], sys.argv[2], folder=Path(sys.argv[3]), shared=Path(sys.argv[4]))
