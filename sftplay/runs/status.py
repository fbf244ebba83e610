"""The runs of an output folder as they stand now: state, step, figures, memory, cost, and the SLURM job of each.

It reads small files and the ends of large ones, and imports neither torch nor the config. A file may be missing, half
written, broken or of an older release: the run's row then says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sftplay.atomic import examine_object, follow_link, is_locked, read_tail
from sftplay.errors import ConfigError, MachineError, suggest
from sftplay.heartbeat import Beat, read_heartbeats
from sftplay.launch.cost import compute_cost, format_cost, last_write_s, read_number, sum_attempts, with_ends
from sftplay.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from sftplay.launch.slurm.job import JobFolder

STATUS, METRICS, JOBS = "status.json", "metrics.jsonl", "slurm.jsonl"

RUN_FILES = (STATUS, "config.resolved.yaml", JOBS, "manifest.json")
"""A folder with one of them is a run's."""

NO_JOB: dict[str, Any] = {
    "job_id": None, "state": "", "reason": "", "nodes": "", "left": "", "start": "", "lives": [], "note": "",
    "log": None,
}  # fmt: skip

QUEUED = ("PENDING", "CONFIGURING", "REQUEUED")
"""SLURM's words for a job that has not started."""

Facts = dict[str, Any]


def list_runs(output: Path) -> list[Path]:
    """Return the run folders below the output folder, the one that was last written to first."""
    folders = output.absolute().iterdir() if output.is_dir() else ()
    runs = [path for path in folders if not path.is_symlink() and _has_one(path, RUN_FILES)]
    return sorted(runs, key=_changed_s, reverse=True)


def find_folder(output: Path, run: str, files: Sequence[str] = RUN_FILES, *, where: str = "") -> Path:
    """Return the folder, with one of these files, of the run of this name or path. Raise ConfigError where there is
    none; `where` says what has named it.
    """
    if found := next((place for place in (Path(run), output / run) if _has_one(place, files)), None):
        return follow_link(found)
    names = [path.name for path in list_runs(output) if _has_one(path, files)]
    otherwise = f"name one of {', '.join(names[:5])}" if names else "train one first, or give its folder or its CONFIG="
    fix, near = suggest(run, names, otherwise)
    what = f"no run {run!r}" + (f" in {output}" if where else "")
    raise ConfigError(what, where=where or str(output), fix=fix, nearest=near)


def _has_one(folder: Path, files: Sequence[str]) -> bool:
    with suppress(OSError):  # somebody else's folder, or a list of names that is no path
        return any((folder / name).exists() for name in files)
    return False


def describe_runs(folders: Sequence[Path]) -> list[Facts]:
    """Return each run as its files have it, and its newest job as SLURM knows it. Nothing in the folders raises."""
    jobs = {folder: job for folder in folders if (folder / JOBS).exists() and (job := _find_job(folder))}
    states, why = _ask_slurm(jobs.values())
    return [_describe(folder, jobs.get(folder), states, why) for folder in folders]


def _describe(folder: Path, job: JobFolder | None, states: Mapping[int, dict[str, str]], why: str) -> Facts:
    """Return the facts of one run; `why` says why SLURM could not be asked."""
    problems: list[str] = []
    now_s = time.time()
    status, manifest = (_read(folder / name, problems) for name in (STATUS, "manifest.json"))
    last = (lines := _read_metrics(folder, problems) or [{}])[-1]
    about_job = {**NO_JOB, **_describe_job(job, states, problems)} if job else NO_JOB
    problems += [why] if job and why else []
    if job is None and (folder / JOBS).exists():
        problems.append(f"{JOBS} cannot be read")
    is_held, state = is_locked(folder / ".lock"), status.get("state")
    now = _find_state(state, is_held=is_held, job_state=about_job["state"])
    beats = _read_beats(folder, status) if now == "running" else []
    known = [read_number(status.get("step")), read_number(last.get("step")), *(beat.step - 1 for beat in beats)]
    if status.get("step") is not None and known[0] is None:
        problems.append(f"{STATUS} has an odd 'step'")
    step, steps = int(max((n for n in known if n is not None), default=0)), read_number(manifest.get("steps"))
    eta_s = _find_eta(lines, left=steps - step) if now == "running" and steps else None
    attempts = status.get("attempts")
    listed = [attempt for attempt in attempts if isinstance(attempt, dict)] if isinstance(attempts, list) else []
    ended = with_ends(listed, end_s=now_s if now == "running" else last_write_s(folder))
    seconds, cost = sum_attempts(ended)
    if seconds is None and len(listed) == 1:
        seconds = read_number(status.get("train_seconds"))  # of an older release, which kept no times
    more = None
    if cost is not None and eta_s is not None:
        more = compute_cost(eta_s, gpus=int(ended[-1]["gpus"]), price_per_hour=float(ended[-1]["price_per_hour"]))
    checkpoint, error = status.get("last_checkpoint"), status.get("error")
    if isinstance(checkpoint, str) and (here := folder.absolute() / "checkpoints" / Path(checkpoint).name).exists():
        checkpoint = str(here)  # the folder may have been copied or moved
    return {
        "run": folder.name,
        **about_job,
        "run_state": state if isinstance(state, str) else None,
        "step": step,
        "exit_code": code if isinstance(code := status.get("exit_code"), int) else None,
        "last_checkpoint": checkpoint if isinstance(checkpoint, str) else None,
        "path": str(folder.absolute()),
        "now": now,
        "steps": None if steps is None else int(steps),
        **{key: _finite(last.get(key)) for key in ("loss", "reward", "tokens_per_s", "step_s")},
        "phase": beats[0].phase if beats else None,
        "eta_s": eta_s,
        "peak_bytes": _find_peak(last),
        "n_attempts": len(listed),
        "seconds": seconds,
        "cost": cost,
        "cost_total": None if cost is None or more is None else cost + more,
        "changed_s": round(max(0.0, now_s - _changed_s(folder)), 1),
        "error": error if isinstance(error, dict) else None,
        "problems": problems,
    }


def _find_state(state: object, *, is_held: bool, job_state: str) -> str:
    """Return running, done, stopped or failed; died where no process is left of a running one; before there is a state
    starting, queued or not started; else unknown.

    The lock of a run on another node may not be seen from here: there its job is asked.
    """
    if state is None:
        return "starting" if is_held else "queued" if job_state in QUEUED else "not started"
    if state == "running" and not is_held and job_state != "RUNNING":
        return "queued" if job_state in QUEUED else "died"
    return state if isinstance(state, str) and state in ("running", "done", "stopped", "failed") else "unknown"


def _read(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        content, problem = examine_object(path)
    except OSError as error:
        content, problem = {}, f"cannot be read ({error.strerror})"
    problems += [f"{path.name} {problem}"] if problem else []
    return content


def _read_metrics(folder: Path, problems: list[str]) -> list[dict[str, Any]]:
    """Return the last lines of metrics.jsonl that have a step."""
    path = folder / METRICS
    try:
        lines = [line for line in read_tail(path) if read_number(line.get("step")) is not None]
        if not lines and path.stat().st_size:
            problems.append(f"{METRICS} ends in no line that can be read")
    except FileNotFoundError:
        return []
    except OSError as error:
        problems.append(f"{METRICS} cannot be read ({error.strerror})")
        return []
    return lines


def _read_beats(folder: Path, status: Mapping[str, Any]) -> list[Beat]:
    """Return the heartbeats of the processes that status.json names; those of an earlier attempt are older."""
    ranks = status.get("ranks")
    pids = {rank.get("pid") for rank in ranks if isinstance(rank, dict)} if isinstance(ranks, list) else set()
    with suppress(OSError):
        return [beat for beat in read_heartbeats(folder / "logs") if beat.pid in pids]
    return []


def _find_eta(lines: Sequence[Mapping[str, Any]], *, left: float) -> float | None:
    """Return the seconds that so many steps will take by the mean of the last lines of the present attempt."""
    times = [_finite(line.get("step_s")) for line in lines[-20:] if line.get("attempt") == lines[-1].get("attempt")]
    known = [seconds for seconds in times if seconds is not None and seconds > 0]
    return round(max(0.0, left) * sum(known) / len(known), 1) if known else None


def _find_peak(line: Mapping[str, Any]) -> int | None:
    """Return the most memory that a process has held: of its GPU, or of the process where it uses none."""
    ranks = line.get("ranks_memory")
    entries = [rank for rank in ranks if isinstance(rank, dict)] if isinstance(ranks, list) else []
    for key in ("peak_bytes", "peak_rss_bytes"):
        sizes = [size for entry in (*entries, line) if (size := read_number(entry.get(key))) is not None]
        if sizes:
            return int(max(sizes))
    return None


def _finite(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 1e300 else None  # type: ignore[arg-type]


def _changed_s(folder: Path) -> float:
    times = [0.0]
    for name in (*RUN_FILES, METRICS):
        with suppress(OSError):
            times.append((folder / name).stat().st_mtime)
    return max(times)


def _find_job(folder: Path) -> JobFolder | None:
    from sftplay.launch.slurm.job import newest_job

    with suppress(OSError):
        return newest_job(folder)
    return None


def _ask_slurm(jobs: Iterable[JobFolder]) -> tuple[dict[int, dict[str, str]], str]:
    """Return what SLURM knows of the jobs, and why it could not be asked."""
    numbers = [job.job for job in jobs]
    if not numbers:
        return {}, ""
    from sftplay.launch.slurm.job import ask_states

    try:
        return ask_states(numbers), ""
    except MachineError as error:
        return {}, f"SLURM does not say how the job stands: {error.what}"


def _describe_job(job: JobFolder, states: Mapping[int, dict[str, str]], problems: list[str]) -> Facts:
    facts: Facts = {"job_id": job.job, **states.get(job.job, {}), "log": str(job.log)}
    try:
        facts |= {"lives": job.lives(), "note": job.note}
    except (OSError, ValueError):
        problems.append(f"{job.path.name}/ cannot be read")
    return facts


def describe_job_line(facts: Facts) -> str:
    """Return a line about the job and how far its run is, and the lines of why it did not go on."""
    reason = f" ({facts['reason']})" if facts["reason"] not in ("", "None") else ""
    parts = [f"{facts['run']}: job {facts['job_id']} {facts['state'] or 'has left the queue'}{reason}"]
    parts += [f"on {facts['nodes']}"] if facts["nodes"] else []
    parts += [f"{facts['left']} left"] if facts["state"] == "RUNNING" else []
    if facts["run_state"]:
        code = f" with {facts['exit_code']}" if facts["exit_code"] is not None else ""
        parts.append(f"run {facts['run_state']}{code} at step {facts['step']}")
    parts += [f"{len(facts['lives'])} attempts have ended"] if len(facts["lives"]) > 1 else []
    return "\n".join([", ".join(parts), *(f"  {line}" for line in facts["note"].splitlines())])


def _write_state(facts: Facts) -> str:
    return f"failed ({facts['exit_code']})" if facts["now"] == "failed" and facts["exit_code"] else facts["now"]


def _write_job(facts: Facts) -> str:
    left = f", {facts['left']} left" if facts["state"] == "RUNNING" and facts["left"] else ""
    return f"{facts['job_id']} {facts['state']}".strip() + left if facts["job_id"] else ""


def _write_age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def _of(key: str, write: Callable[[Any], str]) -> Callable[[Facts], str]:
    return lambda facts: "" if facts[key] is None else write(facts[key])


COLUMNS: tuple[tuple[str, bool, Callable[[Facts], str]], ...] = (
    ("run", False, _of("run", str)),
    ("state", False, _write_state),
    ("step", True, lambda facts: f"{facts['step']:,}" + (f"/{facts['steps']:,}" if facts["steps"] else "")),
    ("loss", True, _of("loss", "{:.4f}".format)),
    ("reward", True, _of("reward", "{:.3f}".format)),
    ("tokens/s", True, _of("tokens_per_s", format_count)),
    ("left", True, _of("eta_s", format_seconds)),
    ("peak memory", True, _of("peak_bytes", format_bytes)),
    ("cost", True, _of("cost", format_cost)),
    ("in all", True, _of("cost_total", format_cost)),
    ("last checkpoint", False, _of("last_checkpoint", lambda path: Path(path).name)),
    ("changed", True, _of("changed_s", _write_age)),
    ("job", False, _write_job),
)
"""Title of a column of the table, whether its cells stand at the right, and what a run has in it."""


def format_table(runs: Sequence[Facts]) -> list[str]:
    """Return the table of runs without columns that all leave empty; below a run, what is wrong with its files."""
    cells = [[write(facts) for facts in runs] for _, _, write in COLUMNS]
    shown = [
        (title, right, column, max(len(title), *map(len, column)))
        for (title, right, _), column in zip(COLUMNS, cells, strict=True)
        if any(column)
    ]
    lines = []
    for n in range(-1, len(runs)):
        parts = []
        for title, right, column, width in shown:
            text = title if n < 0 else column[n]
            parts.append(text.rjust(width) if right else text.ljust(width))
        lines.append("  ".join(parts).rstrip())
        if n >= 0:
            notes = [*runs[n]["note"].splitlines(), *runs[n]["problems"]]
            lines += [f"    {note}" for note in notes]
    return list(map(_printable, lines))


def format_run(facts: Facts) -> list[str]:
    """Return one run in lines: its job where it has one, then what is known of it."""
    steps = f" of {facts['steps']:,}" if facts["steps"] else ""
    age = _write_age(facts["changed_s"])
    head = f"{facts['run']}: {_write_state(facts)} at step {facts['step']:,}{steps}, changed {age}"
    times = f"in {facts['n_attempts']} attempts" if facts["n_attempts"] > 1 else ""
    pace = f", {facts['step_s']:.3g} s a step" if facts["step_s"] is not None else ""
    total = f", {format_cost(facts['cost_total'])} when it is done" if facts["cost_total"] is not None else ""
    error = facts["error"] or {}
    rows = [
        ("folder", facts["path"]),
        ("loss", _of("loss", "{:.4f}".format)(facts)),
        ("reward", _of("reward", "{:.3f}".format)(facts)),
        ("speed", _of("tokens_per_s", lambda speed: f"{format_count(speed)} tokens/s{pace}")(facts)),
        ("now in", facts["phase"] or ""),
        ("left", _of("eta_s", format_seconds)(facts)),
        ("peak memory", _of("peak_bytes", format_bytes)(facts)),
        ("checkpoint", facts["last_checkpoint"] or "none"),
        ("time", _of("seconds", lambda seconds: f"{format_seconds(seconds)} {times}".strip())(facts)),
        ("cost", _of("cost", lambda cost: f"{format_cost(cost)} so far{total}")(facts)),
        ("error", str(error.get("what") or "")),
        ("fix", str(error.get("fix") or "")),
        ("log", facts["log"] or ""),
        *(("note", problem) for problem in facts["problems"]),
    ]
    about_job = [describe_job_line(facts)] if facts["job_id"] else []
    lines = [*about_job, head, *(f"  {name:12}{text}" for name, text in rows if text)]
    return [_printable(line) for text in lines for line in text.splitlines()]


def _printable(text: str) -> str:
    """Return the text without the characters that would steer a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)
