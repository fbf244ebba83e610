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
from sftplay.machine.probe import Machine
from sftplay.runs.gpu_check.conduct import Row, describe_machine, new_place, serve
from sftplay.startup import begin_imports


def main(module: str, name: str, *, folder: str, shared: str) -> int:
    """Run the check called `name` of the table CHECKS in `module`."""
    check = next(each for each in import_module(module).CHECKS if each.name == name)
    return serve(check, new_place(Path(folder), Path(shared)))


if __name__ == "__main__":
    begin_imports()
    raise SystemExit(main(sys.argv[1], sys.argv[2], folder=sys.argv[3], shared=sys.argv[4]))


JSON_FILE, MARKDOWN_FILE = "gpu-check.json", "gpu-check.md"
STATES = {"ok": "ok", "failed": "FAILED", "not_possible": "not possible here"}
HEAD = "| check | outcome | figure, or why not | seconds |\n| --- | --- | --- | --- |"


class Table:
    """The rows so far, and the two files in `folder`."""

    def __init__(self, machine: Machine, folder: Path) -> None:
        self.rows: list[Row] = []
        self._machine, self._folder = describe_machine(machine), folder
        self._began, self._date = time.monotonic(), time.strftime("%Y-%m-%d %H:%M")

    def add(self, row: Row) -> None:
        """Add a row and write both files anew."""
        self.rows.append(row)
        self.save()

    def save(self) -> None:
        """Write both files."""
        write_text(self._folder / JSON_FILE, json.dumps(self.as_dict(), indent=1, ensure_ascii=False) + "\n")
        write_text(self._folder / MARKDOWN_FILE, self.as_markdown())

    def count(self, state: str) -> int:
        return sum(row.state == state for row in self.rows)

    def summary(self) -> str:
        """The last line of the command."""
        counts = ", ".join(f"{self.count(state)} {text}" for state, text in STATES.items())
        return f"{counts}; {time.monotonic() - self._began:.0f} s"

    def as_dict(self) -> dict[str, Any]:
        """The content of gpu-check.json."""
        rows = [{key: value for key, value in asdict(row).items() if value or key in ROW_KEYS} for row in self.rows]
        return {"date": self._date, **self._machine, "rows": rows}

    def as_markdown(self) -> str:
        """The content of gpu-check.md."""
        about = self._machine
        versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
        driver = f", driver {about['driver']} (CUDA {about['cuda']})" if about["driver"] else ""
        card = about["card"] or f"no GPU ({about['cores']} CPU cores)"
        lines = [as_line(row) for row in self.rows]
        return f"{self._date}, {card}{driver}, {about['system']}; {versions}.\n\n{HEAD}\n" + "\n".join(lines) + "\n"


ROW_KEYS = ("name", "state", "why", "figure", "seconds")
"""Of a row, the keys that are always there."""


def as_line(row: Row) -> str:
    """A row of the Markdown table."""
    text = " ".join((row.figure or row.why).split()).replace("|", "\\|")
    return f"| {row.name} | {STATES[row.state]} | {text} | {row.seconds:.0f} |"
