"""What lies in a run folder, read for people: every file may be missing, broken or half written.

It judges nothing; what could not be read is listed in `troubles`. Needs neither torch nor transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from sftplay.atomic import is_locked
from sftplay.config import layers
from sftplay.config.keys import REMOVED_KEYS, RENAMED_KEYS
from sftplay.config.resolved import flow
from sftplay.errors import ConfigError
from sftplay.launch.checkpoints import is_marked, list_checkpoints, read_step
from sftplay.launch.run_folder import RunFolder
from sftplay.report.figures import MOST_SOURCES, History, Point, as_number, read_history
from sftplay.tasks import TASKS, TaskRow


@dataclass(frozen=True)
class Setting:
    """One config value: its dotted key, the value, and where it was set (empty for a default)."""

    key: str
    value: Any
    origin: str

    @property
    def text(self) -> str:
        """The value as the YAML has it."""
        return flow(self.value)


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """What a run folder holds, with empty values for what could not be read."""

    folder: RunFolder
    plan: dict[str, Any]
    manifest: dict[str, Any]
    status: dict[str, Any]
    data: dict[str, Any]
    sample: dict[str, Any]
    settings: dict[str, Setting]
    evals: dict[str, dict[str, Any]]
    """Name of a file in eval/, without .json -> its figures; and what stands for `before` and `after`."""

    stands_for: dict[str, str]
    """before and after -> the files that stand for them."""

    history: History
    held_out: list[Point]
    """(step, held-out loss) measured while the run trained."""

    held_out_sources: dict[str, list[Point]]
    """The same for each source of a mixture."""

    launch: str
    samples: list[tuple[str, str]]
    """(name, text) of the first texts in samples/."""

    notes: list[str]
    """Notes of the run, from its log."""

    set_aside: list[str]
    """Checkpoints that were moved to checkpoints/incomplete."""

    unmarked: list[str]
    """Checkpoints that are not marked complete."""

    is_held: bool
    """Some process holds the run at this moment."""

    troubles: list[str]
    """What could not be read, and why."""

    def value(self, key: str, default: Any = None) -> Any:
        """The config value at a dotted key."""
        setting = self.settings.get(key)
        return default if setting is None else setting.value

    @property
    def task(self) -> TaskRow | None:
        """The row of the run's task; None where its config could not be read."""
        return TASKS.get(str(self.value("task_mode")))

    @property
    def attempts(self) -> list[dict[str, Any]]:
        """The attempts of status.json, oldest first."""
        return mappings(self.status.get("attempts"))

    @property
    def state(self) -> str:
        """running, done, stopped or failed; interrupted when no process is left of a running one; else unknown."""
        state = self.status.get("state")
        if state == "running" and not self.is_held:
            return "interrupted"
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


def read_run_files(folder: RunFolder) -> RunFiles:
    """Read everything in the folder. Never raises for what it finds there."""
    reader, checkpoints = _Reader(folder), list_checkpoints(folder.checkpoints)
    evals = {path.stem: reader.json(f"eval/{path.name}") for path in _list(folder.eval, "*.json")}
    stands_for = compared(evals)
    samples = [path.name for path in _list(folder.path / "samples", "*.txt")][:5]
    return RunFiles(
        folder=folder,
        plan=reader.json("plan.json"),
        manifest=reader.json("manifest.json"),
        status=reader.json("status.json"),
        data=reader.json("data_report.json"),
        sample=reader.json("samples/masked.json", is_optional=True),
        settings=reader.settings(),
        evals=evals | {tag: evals[name] for tag, name in stands_for.items()},
        stands_for=stands_for,
        launch=reader.text("launch.txt"),
        samples=[(name, reader.text(f"samples/{name}")) for name in samples],
        history=reader.history(),
        held_out=reader.held_out(checkpoints[-1:], evals),
        held_out_sources=held_out_sources(evals),
        notes=reader.notes(),
        set_aside=[path.name for path in _list(folder.checkpoints / "incomplete", "checkpoint-*")],
        unmarked=[path.name for path in checkpoints if not is_marked(path)],
        is_held=is_locked(folder.path / ".lock"),
        troubles=reader.troubles,
    )


def mapping(value: object) -> dict[str, Any]:
    """Return the value if it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}


def mappings(value: object) -> list[dict[str, Any]]:
    """Return the objects in a list; none when it is no list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def texts(value: object) -> list[str]:
    """Return the texts in a list; none when it is no list."""
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def read_objects(path: Path, most_lines: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSONL file that can be read, among its first lines; none when the file cannot."""
    try:
        with path.open("rb") as handle:
            for raw in islice(handle, most_lines):
                try:
                    row = json.loads(raw)
                except (ValueError, RecursionError):
                    continue
                if isinstance(row, dict):
                    yield row
    except OSError:
        return


def answer_rows(folder: RunFolder, tag: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of eval/<tag>.jsonl that can be read."""
    return read_objects(folder.eval / f"{tag}.jsonl")


class _Reader:
    """Reads the files of one folder; what cannot be read is empty, and named in `troubles`."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.troubles: list[str] = []

    def json(self, name: str, *, is_optional: bool = False) -> dict[str, Any]:
        try:
            content = json.loads((self.folder.path / name).read_bytes())
        except FileNotFoundError:
            if not is_optional:
                self.troubles.append(f"{name} is not there")
            return {}
        except (OSError, ValueError, RecursionError) as error:
            self.troubles.append(f"{name} cannot be read ({_shorten(error)})")
            return {}
        if not isinstance(content, dict):
            self.troubles.append(f"{name} holds no object")
        return mapping(content)

    def text(self, name: str) -> str:
        try:
            return (self.folder.path / name).read_bytes().decode("utf-8", "replace").strip()
        except OSError as error:
            self.troubles.append(f"{name} is not there" if isinstance(error, FileNotFoundError) else _shorten(error))
            return ""

    def settings(self) -> dict[str, Setting]:
        """Return dotted config key -> its value and origin; renamed keys have their new names."""
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
                settings[key] = Setting(key, value, origin)
        return settings

    def history(self) -> History:
        path = self.folder.metrics
        if not path.exists():
            self.troubles.append("metrics.jsonl is not there: no step was logged yet")
        try:
            return read_history(path)
        except OSError as error:
            self.troubles.append(f"metrics.jsonl cannot be read ({error.strerror})")
            return History()

    def held_out(self, newest: list[Path], evals: dict[str, dict[str, Any]]) -> list[Point]:
        """(step, held-out loss), from the newest checkpoint and from eval/step-N.json."""
        losses: dict[float, float] = {}
        for checkpoint in newest:  # the Trainer keeps them nowhere else
            path = checkpoint / "trainer_state.json"
            name = str(path.relative_to(self.folder.path))
            if not path.is_file():
                continue
            if path.stat().st_size > 2**25:  # it would take seconds and gigabytes
                self.troubles.append(f"{name} is too large to look for held-out losses in")
                continue
            for entry in mappings(self.json(name).get("log_history")):
                step, loss = as_number(entry.get("step")), as_number(entry.get("eval_loss"))
                if step is not None and loss is not None and abs(step) <= max(read_step(checkpoint), 0):
                    losses[step] = loss
        for step, figures in by_step(evals):
            if (loss := as_number(figures.get("loss"))) is not None:
                losses[step] = loss
        return sorted(losses.items())

    def notes(self) -> list[str]:
        """The kit's own log lines that a reader of the report must not miss."""
        path = self.folder.logs / "rank0.log"
        marks = ("] skipping ", ": skipped", "passed over", "is not continued", "] note: ")
        lines: dict[str, None] = {}
        try:
            if path.stat().st_size > 2**26:
                self.troubles.append("logs/rank0.log is too large to look for notes in")
                return []
            with path.open("rb") as handle:
                for raw in handle:
                    line = raw[:500].decode("utf-8", "replace").strip() if raw.startswith(b"[") else ""
                    if any(part in line for part in marks):
                        lines[line.partition("] ")[2].removeprefix("note: ")] = None
        except OSError:
            return []
        return list(lines)[:50]


def _shorten(error: Exception) -> str:
    lines = (getattr(error, "strerror", None) or str(error) or type(error).__name__).splitlines()
    return lines[0][:200] if lines else type(error).__name__


def _leaves(tree: dict[str, Any], above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*above, key))
        else:
            yield (*above, key), value


def _list(folder: Path, pattern: str) -> list[Path]:
    try:
        return sorted(path for path in folder.glob(pattern) if not path.name.startswith("."))
    except OSError:
        return []


def by_step(evals: dict[str, dict[str, Any]]) -> Iterator[tuple[float, dict[str, Any]]]:
    """Yield the measurements while training, each with its step."""
    for name, figures in evals.items():
        step = name.removeprefix("step-")
        if name.startswith("step-") and step.isdecimal() and len(step) < 16:
            yield float(step), figures


def compared(evals: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Return before and after -> names of the measurements that stand for them.

    A run that learns from rewards measures itself at its first and at its last step.
    """
    steps = sorted(step for step, figures in by_step(evals) if "reward" in figures)
    if len(steps) < 2 or steps[0] != 0 or {"before", "after"} & set(evals):
        return {}
    return {"before": "step-0", "after": f"step-{steps[-1]:.0f}"}


def held_out_sources(evals: dict[str, dict[str, Any]]) -> dict[str, list[Point]]:
    """Return (step, held-out loss) of each source of a mixture."""
    points: dict[str, list[Point]] = {}
    for step, figures in sorted(by_step(evals), key=lambda pair: pair[0]):
        for name, source in list(mapping(figures.get("sources")).items())[:MOST_SOURCES]:
            if (loss := as_number(mapping(source).get("loss"))) is not None:
                points.setdefault(name, []).append((step, loss))
    return points
