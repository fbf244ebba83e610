"""The table of gpu-check: a check in a process of its own, and its row."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from sftplay.atomic import write_text
from sftplay.machine.probe import Machine, probe
from sftplay.runs.gpu_check.check import CheckContext
from sftplay.runs.gpu_check.conduct import Row, serve
from sftplay.startup import begin_imports


def main(module: str, name: str, *, folder: str, shared: str) -> int:
    """Run the check called `name` of the table CHECKS in `module`."""
    check = next(check for check in import_module(module).CHECKS if check.name == name)
    return serve(check, CheckContext(probe(), Path(folder), Path(shared)))


if __name__ == "__main__":
    begin_imports()
    raise SystemExit(main(sys.argv[1], sys.argv[2], folder=sys.argv[3], shared=sys.argv[4]))


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

    def add(self, row: Row) -> None:
        """Add a row and write both files anew."""
        self.rows.append(row)
        self.save()

    def save(self) -> None:
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
