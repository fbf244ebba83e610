"""What lies in a run folder, read for people: every file may be missing, broken or half written."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from sftplay.atomic import is_locked
from sftplay.config import layers
from sftplay.config.keys import REMOVED_KEYS, RENAMED_KEYS
from sftplay.config.resolved import flow
from sftplay.errors import ConfigError
from sftplay.launch.checkpoints import is_marked, list_checkpoints
from sftplay.launch.run_folder import RunFolder
from sftplay.report.figures import as_number, as_size
from sftplay.report.history import History, read_history
from sftplay.tasks import TASKS, TaskRow

NOTED = ("] skipping ", ": skipped", "passed over", "is not continued", "] note: ")
"""What marks a log line of the kit that a reader of the report must not miss."""


class Setting(NamedTuple):
    """One config value, and where it was set (empty for a default)."""

    value: Any
    origin: str


class RunFiles:
    """What a run folder holds, with empty values for what could not be read. Nothing that lies there raises."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.troubles: list[str] = []
        """What could not be read, and why."""

        self.plan = self._read_json("plan.json")
        self.manifest = self._read_json("manifest.json")
        self.status = self._read_json("status.json")
        self.data = self._read_json("data_report.json")
        self.sample = self._read_json("samples/masked.json") if (folder.path / "samples/masked.json").exists() else {}
        self.settings = self._read_settings()
        """Dotted config key -> its value; keys that were renamed since have their new names."""

        self.history = self._read_history()
        names = _list(folder.eval, "*.json")
        self.evals = {name.removesuffix(".json"): self._read_json(f"eval/{name}") for name in names}
        """Name of a file in eval/, without .json -> its figures; and what stands for `before` and `after`."""

        steps = [step for step, figures in self.measured() if "reward" in figures]
        self.stands_for: dict[str, str] = {}
        """before and after -> the file that stands for one that is not there: a run that learns from rewards measures
        itself at its first and at its last step."""

        if steps[:1] == [0] and (len(steps) > 1 or "after" in self.evals):
            ends = {"before": "step-0", "after": f"step-{steps[-1]:.0f}"}
            self.stands_for = {tag: name for tag, name in ends.items() if tag not in self.evals}
            self.evals |= {tag: self.evals[name] for tag, name in self.stands_for.items()}
        self.parity = self._read_json("parity.json") if (folder.path / "parity.json").exists() else {}
        """What engines were found to answer."""

        self.launch = (self._read("launch.txt") or b"").decode("utf-8", "replace").strip()
        self.notes = self._read_notes()
        self.set_aside = _list(folder.checkpoints / "incomplete", "checkpoint-*")
        """Checkpoints that were moved to checkpoints/incomplete."""

        self.unmarked = [path.name for path in list_checkpoints(folder.checkpoints) if not is_marked(path)]
        """Checkpoints that are not marked complete."""

        self.is_held = is_locked(folder.path / ".lock")
        """Some process holds the run at this moment."""

    def value(self, key: str, default: Any = None) -> Any:
        """Return the config value at a dotted key."""
        return self.settings[key].value if key in self.settings else default

    def measured(self) -> list[tuple[float, dict[str, Any]]]:
        """Return the measurements while training, each with its step, in order."""
        pairs = ((name.removeprefix("step-"), figures) for name, figures in self.evals.items() if name[:5] == "step-")
        known = [(float(step), figures) for step, figures in pairs if step.isdecimal() and len(step) < 16]
        return sorted(known, key=lambda pair: pair[0])

    def curve(self, key: str) -> list[tuple[float, float]]:
        """Return one figure of the measurements over their steps."""
        return [
            (step, value) for step, figures in self.measured() if (value := as_number(figures.get(key))) is not None
        ]

    @property
    def task(self) -> TaskRow | None:
        """The row of the run's task; None where its config could not be read."""
        return TASKS.get(str(self.value("task_mode")))

    @property
    def learns_from_rewards(self) -> bool:
        """Whether the loss says nothing, because the task learns from rewards."""
        return self.task is not None and self.task.learns_from_rewards

    @property
    def is_evaluated(self) -> bool:
        """Whether something was measured other than while training."""
        return not all(name.startswith("step-") for name in self.evals)

    @property
    def attempts(self) -> list[dict[str, Any]]:
        """The attempts of status.json, oldest first."""
        return mappings(self.status.get("attempts"))

    @cached_property
    def spent(self) -> tuple[float | None, float | None]:
        """Seconds and cost of all attempts; None where they are not known.

        A run of an older release, which kept no times, has the seconds of its last attempt, or else of its logged
        steps, and no cost.
        """
        from sftplay.launch.cost import last_write_s, sum_attempts, with_ends

        end_s = time.time() if self.is_held else last_write_s(self.folder.path)
        known = sum_attempts(with_ends(self.attempts, end_s=end_s))
        if known[0] is not None:
            return known
        seconds = as_size(self.status.get("train_seconds")) if len(self.attempts) == 1 else None
        return self.history.seconds if seconds is None else seconds, None

    @property
    def resumed(self) -> list[float]:
        """The steps after which the run was resumed."""
        steps = [as_number(attempt.get("from_step")) for attempt in self.attempts[1:51]]
        return [step for step in steps if step is not None and 0 <= step <= self.step]

    @property
    def state(self) -> str:
        """running, done, stopped or failed; died when no process is left of a running one; else unknown."""
        state = self.status.get("state")
        if state == "running" and not self.is_held:
            return "died"
        return state if isinstance(state, str) and state else "unknown"

    @property
    def step(self) -> int:
        """The last known step."""
        known = [as_number(self.status.get("step")) or 0.0, *(steps[-1] for steps in self.history.steps.values())]
        return int(max((value for value in known if abs(value) < 2**53), default=0))

    @property
    def steps(self) -> int | None:
        """The steps the run was to have."""
        planned = as_number(self.manifest.get("steps")) or as_number(self.value("train.max_steps"))
        return int(planned) if planned and abs(planned) < 2**53 else None

    def rows(self, name: str, most_lines: int | None = None) -> Iterator[dict[str, Any]]:
        """Yield the objects of a JSONL file that can be read, among its first lines; none when the file cannot."""
        try:
            with (self.folder.path / name).open("rb") as handle:
                for raw in islice(handle, most_lines):
                    with suppress(ValueError, RecursionError):
                        if isinstance(row := json.loads(raw), dict):
                            yield row
        except OSError:
            return

    def answers(self, name: str) -> Iterator[dict[str, Any]]:
        """Yield the answers next to the figures `name` of `evals`."""
        return self.rows(f"eval/{self.stands_for.get(name, name)}.jsonl")

    def _read(self, name: str) -> bytes | None:
        try:
            return (self.folder.path / name).read_bytes()
        except FileNotFoundError:
            self.troubles.append(f"{name} is not there")
        except OSError as error:
            self.troubles.append(f"{name} cannot be read ({error.strerror})")
        return None

    def _read_json(self, name: str) -> dict[str, Any]:
        raw, content = self._read(name), None
        try:
            content = json.loads(b"{}" if raw is None else raw)
            if not isinstance(content, dict):
                self.troubles.append(f"{name} holds no object")
        except (ValueError, RecursionError) as error:
            self.troubles.append(f"{name} cannot be read ({str(error).partition(chr(10))[0][:200]})")
        return mapping(content)

    def _read_settings(self) -> dict[str, Setting]:
        path = self.folder.resolved
        try:
            document = layers.read(path, path.name)
            lines = path.read_text(encoding="utf-8-sig").splitlines()
        except ConfigError as error:
            self.troubles.append(f"{path.name} cannot be read ({error.what})")
            return {}
        settings = {}
        for parts, value in _leaves(document.values, ()):
            number = document.lines.get(parts, 0)
            line = lines[number - 1] if 0 < number <= len(lines) else ""
            # The comment behind a value, as `dump_resolved` writes it; a `#` inside the value is no comment.
            origin = line.partition(f": {flow(value)}  # ")[2]
            key = RENAMED_KEYS.get(".".join(parts), ".".join(parts))
            if key not in REMOVED_KEYS:
                settings[key] = Setting(value, origin)
        return settings

    def _read_history(self) -> History:
        try:
            return read_history(self.folder.metrics)
        except FileNotFoundError:
            self.troubles.append("metrics.jsonl is not there: no step was logged yet")
        except OSError as error:
            self.troubles.append(f"metrics.jsonl cannot be read ({error.strerror})")
        return History()

    def _read_notes(self) -> list[str]:
        """The kit's own log lines that a reader of the report must not miss."""
        path = self.folder.logs / "rank0.log"
        lines: dict[str, None] = {}
        with suppress(OSError), path.open("rb") as handle:
            for raw in islice(handle, 500_000):
                line = raw[:500].decode("utf-8", "replace").strip() if raw.startswith(b"[") else ""
                if any(part in line for part in NOTED):
                    lines[line.partition("] ")[2].removeprefix("note: ")] = None
        return list(lines)[:50]


def mapping(value: object) -> dict[str, Any]:
    """Return the value if it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}


def mappings(value: object) -> list[dict[str, Any]]:
    """Return the objects in a list; none when it is no list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def texts(value: object) -> list[str]:
    """Return the texts in a list; none when it is no list."""
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def _leaves(tree: dict[str, Any], above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*above, key))
        else:
            yield (*above, key), value


def _list(folder: Path, pattern: str) -> list[str]:
    """The names in a folder that are not hidden."""
    try:
        return sorted(path.name for path in folder.glob(pattern) if not path.name.startswith("."))
    except OSError:
        return []
