"""The folder of a run: its files, its state, and how it is made."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from sftplay import log
from sftplay.atomic import examine_object, follow_link, is_locked, locked, locked_if_possible, read_lines, write_text
from sftplay.config.layers import RESOLVED
from sftplay.config.run import RunConfig
from sftplay.config.section import Positive
from sftplay.errors import ConfigError, MachineError, suggest
from sftplay.heartbeat import read_heartbeats

PARENT = "SFTPLAY_PARENT"  # The parent sets it to its own pid. By this a worker sees whether its parent is still alive.
EXPECTS_GPU = "SFTPLAY_EXPECTS_GPU"
"""The parent sets it where the run is planned for a GPU. A worker that finds none ends."""

PASSED_ON = "SFTPLAY_PASSED_ON"
"""The parent sets it to the names of the variables that a launcher passes on to processes on other machines."""


class _Fields(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class _Attempt(_Fields):
    from_step: int = 0
    to_step: int | None = None
    cause: str | None


class _Rank(_Fields):
    pid: int


class _Error(_Fields):
    code: str
    what: str
    batch_size: Positive | None = None


class _Status(_Fields):
    state: str | None = None
    step: int | None = None
    pid: int | None = None
    exit_code: int | None = None
    signal: str | None = None
    last_checkpoint: str | None = None
    attempts: list[_Attempt] = []
    ranks: list[_Rank] | None = None
    error: _Error | None = None


class _Plan(_Fields):
    world_size: Positive = 1
    batch_size: Positive = 1
    peak_bytes: float | None = None
    allocated_bytes: float | None = None
    resized: bool = False
    shortages: list[dict[str, Any]] = []


SHAPES: dict[str, type[_Fields]] = {"status.json": _Status, "plan.json": _Plan}


class _Event(_Fields):
    event: str
    batch_size: Positive | None = None


def _is_event(line: dict[str, Any]) -> bool:
    with suppress(ValidationError):
        event = _Event.model_validate(line)
        return event.event != "out_of_memory" or event.batch_size is not None
    return False


def odd_fields(name: str, content: dict[str, Any]) -> list[str]:
    """The fields of the file `name` whose values are not of the kind that the kit writes."""
    try:
        SHAPES.get(name, _Fields).model_validate(content)
    except ValidationError as error:
        return sorted({str(problem["loc"][0]) for problem in error.errors(include_url=False)})
    return []


EVENTS = "events.jsonl"

ASKED_S = 0.1  # Who asks by `is_locked` holds a lock for a moment, such as `make status`: so long it is tried again.
SET_ASIDE = ".set-aside"  # the folder next to the runs with those that made no step
BROKEN = ".broken"  # what is added to the name of a small file that was passed over
OUT_OF_MEMORY, RESIZED, RESTARTED = "out_of_memory", "resized", "restarted"
"""Events of a run: a step was run again in smaller micro-batches; later attempts have other sizes; an attempt started
after a process of the previous one had died."""


@dataclass(unsafe_hash=True)
class RunFolder:
    """`outputs/<run_name>/` and the paths in it."""

    path: Path

    def __post_init__(self) -> None:
        self.name, self.resolved = self.path.name, self.path / RESOLVED
        self.checkpoints, self.logs, self.eval = (self.path / name for name in ("checkpoints", "logs", "eval"))
        self.metrics = self.path / "metrics.jsonl"

    @property
    def result(self) -> Path | None:
        """The folder of the tuned weights; None before they are saved."""
        return next((self.path / kind for kind in ("adapter", "model") if (self.path / kind).is_dir()), None)

    @property
    def remedy(self) -> str:
        """What to do about a run without a result."""
        return "wait for its end: it runs" if is_locked(self.path / ".lock") else "finish it with `make resume`"

    @property
    def has_made_step(self) -> bool:
        """True when the run has made an optimizer step. Otherwise a start under its name would lose nothing."""
        status = self.read_json("status.json")
        return bool(
            self.result
            or status.get("state") == "done"
            or status.get("step")
            or any(self.checkpoints.glob("checkpoint-*"))
            or (self.metrics.exists() and self.metrics.stat().st_size)
            or any(beat.step > 1 for beat in read_heartbeats(self.logs))  # 1 while the first step is computed
        )

    def create(self) -> None:
        """Create the folder, under the run's lock. ConfigError if a run has started here since `new_folder`."""
        if self.resolved.exists():
            raise name_taken(self, str(self.path))
        self.logs.mkdir(parents=True, exist_ok=True)

    def set_aside(self) -> RunFolder:
        """Move the folder below SET_ASIDE, under its name and the time. The caller holds the run's lock.

        What belongs to jobs of SLURM stays: the job writes into it until its end, and SLURM knows its path. Raises
        MachineError if it cannot be moved.
        """
        stamp = time.strftime("%Y%m%d-%H%M%S")
        target = first_free(RunFolder(self.path.parent / SET_ASIDE / f"{self.name}-{stamp}"), claim=True).path
        shutil.rmtree(self.path / "base", ignore_errors=True)  # as large as the model, and merged again from its files
        try:
            self.path.rename(target)
            for path in target.glob("slurm*"):
                self.path.mkdir(exist_ok=True)
                path.rename(self.path / path.name)
        except OSError as error:
            raise _not_writable(target, error) from error
        return RunFolder(target)

    def become_latest(self) -> None:
        """Make the link `latest` next to the folder point to it. A file of the user's by that name is left alone."""
        latest = self.path.parent / "latest"
        if latest.is_symlink() or not latest.exists():
            scratch = latest.with_name(f".latest-{os.getpid()}")
            scratch.symlink_to(self.name)
            scratch.replace(latest)

    def write_json(self, name: str, content: Any) -> None:
        write_text(self.path / name, json.dumps(content, indent=1, ensure_ascii=False, default=str) + "\n")

    def read_json(self, name: str) -> dict[str, Any]:
        """The file's object without its odd fields; empty when there is none. `set_broken_aside` says what is odd."""
        content = examine_object(self.path / name)[0]
        odd = odd_fields(name, content)
        return {key: value for key, value in content.items() if key not in odd}

    def at_base_commit(self, cfg: RunConfig) -> RunConfig:
        """Return `cfg` with the commit of the base on which this run began: the hub may have another one by now. A base
        that is not the hub's, or is that of an adapter, which names its revision, stays as it is.
        """
        commit = self.read_json("manifest.json").get("base_commit")
        return cfg.with_values({"model.revision": commit}, "manifest.json") if commit else cfg

    def set_broken_aside(self) -> None:
        """Rename the run's broken small files, and write their whole fields anew. Call it under the run's lock."""
        for name in SHAPES:
            content, problem = examine_object(self.path / name)
            if odd := odd_fields(name, content):
                problem = f"has an odd {', '.join(map(repr, odd))}"
            if problem:
                log.say(f"{name} {problem}: passed over, and kept as {name}{BROKEN}", "resume")
                whole = self.read_json(name)
                (self.path / name).replace(self.path / f"{name}{BROKEN}")
                if whole:
                    self.write_json(name, whole)
        if broken := read_lines(self.path / EVENTS)[1]:
            log.say(f"{EVENTS}: line {', '.join(map(str, broken))} cannot be read: passed over", "resume")

    def add_event(self, event: str, **facts: Any) -> None:
        """Append an event after the making of plan.json to events.jsonl. The main rank or the parent calls it."""
        attempt = len(self.read_json("status.json").get("attempts", []))
        line = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "attempt": attempt, "event": event, **facts}
        with (self.path / EVENTS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def read_events(self) -> list[dict[str, Any]]:
        """The lines of events.jsonl, oldest first. Runs of earlier versions have their events in plan.json."""
        plan = self.read_json("plan.json")
        events: list[dict[str, Any]] = [{"event": RESIZED}] if plan.get("resized") else []
        events += [{"event": OUT_OF_MEMORY, **shortage} for shortage in plan.get("shortages", [])]
        return list(filter(_is_event, events + read_lines(self.path / EVENTS)[0]))

    @property
    def is_resized(self) -> bool:
        """True when micro-batch, accumulation or number of processes differ from those of the run's first start."""
        return any(event["event"] == RESIZED for event in self.read_events())

    def update_status(self, **changes: Any) -> None:
        """Merge `changes` into status.json. Several may do so at once: the main rank's thread, a failing rank."""
        self._edit_status(lambda _: changes)

    def close_attempt(self, cause: str, *, again: bool = False) -> None:
        """Record at which step the running attempt ended and why. `again` replaces an earlier record."""

        def close(status: dict[str, Any]) -> dict[str, Any]:
            attempts = status.get("attempts", [])
            if attempts and (again or attempts[-1]["cause"] is None):
                attempts[-1] |= {"to_step": status.get("step", 0), "cause": cause}
                if isinstance(started := attempts[-1].get("started"), int | float):
                    attempts[-1]["seconds"] = round(max(0.0, time.time() - started), 3)
                return {"attempts": attempts}
            return {}

        self._edit_status(close)

    def _edit_status(self, find_changes: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        with locked_if_possible(self.path / ".status.lock"):
            status = self.read_json("status.json")
            if changes := find_changes(status):
                self.write_json("status.json", {**status, **changes})

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the run until this process dies. ConfigError if another one does, MachineError without a folder."""
        with ExitStack() as stack:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                deadline = time.monotonic() + ASKED_S
                while True:
                    try:
                        stack.enter_context(locked(self.path / ".lock", waits=False))
                        break
                    except BlockingIOError:
                        if time.monotonic() > deadline:
                            raise
                        time.sleep(0.01)
            except BlockingIOError:
                pid = self.read_json("status.json").get("pid", "unknown")
                what, fix = f"run {self.name!r} is running (process {pid})", "wait for it to end, or change run_name"
                raise ConfigError(what, where=str(self.path), fix=fix) from None
            except OSError as error:
                raise _not_writable(self.path, error) from error
            yield


def new_folder(cfg: RunConfig, config_path: str, *, claim: bool = True) -> RunFolder:
    """The folder of a run that has not started yet: `run_name`, or the config's stem and the local time.

    With `claim`, a folder named by the time is created here. Without `claim` nothing shall start, and only a note says
    that a name is taken. Raises ConfigError if a run of that name exists; MachineError if the folder cannot be created.
    """
    name = cfg.run_name or f"{Path(config_path).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = RunFolder(Path(cfg.output_dir) / name)
    if cfg.run_name is None:
        return first_free(folder, claim=claim)
    if folder.resolved.exists() and folder.has_made_step:
        taken = name_taken(folder, cfg.describe_origin("run_name"))
        if claim:
            raise taken
        log.say(f"note: {taken.what}; a start would be refused ({taken.fix})")
    return folder


def first_free(folder: RunFolder, *, claim: bool) -> RunFolder:
    """The folder, or with a number behind its name the first that is not there; with `claim` it is created."""
    path, n = folder.path, 2
    while True:
        if not path.exists():
            try:
                if claim:
                    path.mkdir(parents=True)
                return RunFolder(path)
            except FileExistsError:  # two runs of one config within a second
                pass
            except OSError as error:
                raise _not_writable(path, error) from error
        path, n = folder.path.with_name(f"{folder.name}-{n}"), n + 1


def find_run(cfg: RunConfig, config_path: str, *, run: str | None = None) -> RunFolder:
    """The run `run` (a name or folder), else of the config's fixed name, else its newest one; else ConfigError."""
    output = Path(cfg.output_dir)
    if run or cfg.run_name:
        candidates = [Path(run), output / run] if run else [output / str(cfg.run_name)]
        found = next((path for path in candidates if (path / RESOLVED).is_file()), None)
        if found is None:
            name = run or str(cfg.run_name)
            known = [path.parent.name for path in output.glob(f"*/{RESOLVED}")]
            fix, near = suggest(name, known, "train first, or check the name")
            raise ConfigError(f"no run {name!r}", where=str(output), fix=fix, nearest=near)
        return RunFolder(follow_link(found))
    # Only names that new_folder makes from this stem: runs of `run.yaml`, but not those of `run-long.yaml`.
    pattern = re.compile(re.escape(Path(config_path).stem) + r"-\d{8}-\d{6}(-\d+)?")
    runs = [path for path in output.glob("*") if pattern.fullmatch(path.name) and (path / RESOLVED).is_file()]
    if not runs:
        raise ConfigError(f"no run of {config_path} yet", where=str(output), fix="train first, or name one with RUN=")
    return RunFolder(max(runs, key=lambda path: (path / RESOLVED).stat().st_mtime_ns))


def has_begun(cfg: RunConfig, config_path: str) -> bool:
    """True when `find_run` would find a run, and it has made a step."""
    with suppress(ConfigError):
        return find_run(cfg, config_path).has_made_step
    return False


def name_taken(folder: RunFolder, where: str) -> ConfigError:
    """The refusal to start a run under the name of another one."""
    is_done = folder.read_json("status.json").get("state") == "done"
    fix = "" if is_done else f"{folder.remedy}, or "
    return ConfigError(f"a run called {folder.name!r} exists", where=where, fix=f"{fix}choose another run_name")


def _not_writable(path: Path, error: OSError) -> MachineError:
    return MachineError(f"cannot be written ({error.strerror})", where=str(path), fix="choose another output_dir")
