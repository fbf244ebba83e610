"""Ask SLURM about jobs: its commands, the records kept of submitted jobs, their state in words."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sftplay import __version__
from sftplay.atomic import read_lines, read_object, write_text
from sftplay.errors import MachineError
from sftplay.launch.run_folder import RunFolder
from sftplay.machine.probe import library_versions
from sftplay.units import format_bytes

JOB_FILE, CONFIG, JOBS, LOCK = "slurm.sbatch", "slurm.yaml", "slurm.jsonl", "slurm.lock"
"""In the run's folder: the job file, the config as it was submitted, a line for each queued job, and a lock."""

LOG, SUMMARY, ENVIRONMENT = "training_output.log", "job_summary.txt", "env.txt"
LIVES, NOTE = "lives.jsonl", "requeue_failed.txt"
SERVER, SERVER_LOG = "generation_server.url", "generation_server.log"


@dataclass(unsafe_hash=True)
class JobFolder:
    """`slurm-<JOBID>/` in a run's folder."""

    run: Path
    job: int

    def __post_init__(self) -> None:
        self.path = self.run / f"slurm-{self.job}"
        self.output = self.run / f"slurm-{self.job}.out"
        """What the job's shell and SLURM itself have written."""
        self.log, self.server_log = self.path / LOG, self.path / SERVER_LOG
        self.server = self.path / SERVER
        """The address of the job's generation server, which is there while one answers."""

    @property
    def note(self) -> str:
        """Why the job did not go on by itself; empty where it did."""
        path = self.path / NOTE
        return path.read_text(encoding="utf-8").strip() if path.exists() else ""

    def lives(self) -> list[dict[str, Any]]:
        """The lives that have ended, oldest first."""
        return read_lines(self.path / LIVES)[0]

    def add_life(self, **facts: Any) -> None:
        with (self.path / LIVES).open("a", encoding="utf-8") as file:
            file.write(json.dumps(facts) + "\n")


def add_job(run: Path, job: int, **facts: Any) -> None:
    """Record that a job of this run was queued."""
    with (run / JOBS).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"job_id": job, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **facts}) + "\n")


def newest_job(run: Path) -> JobFolder | None:
    """The job of this run that was queued last; None where there was none."""
    jobs = [line["job_id"] for line in read_lines(run / JOBS)[0] if isinstance(line.get("job_id"), int)]
    return JobFolder(run, jobs[-1]) if jobs else None


LIMIT_S = 60.0  # how long a command may take to answer
COLUMNS = {"state": "%T", "reason": "%r", "nodes": "%N", "left": "%L", "start": "%S"}
"""What `squeue` tells of a job, and its codes (squeue(1), --format)."""

ACTIVE = ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "REQUEUED", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED")
"""States of a job that will train, or does."""


@dataclass(frozen=True)
class JobState:
    """A job as the queue shows it. `state` is empty where SLURM no longer knows the job."""

    state: str = ""
    reason: str = ""
    nodes: str = ""
    left: str = ""
    start: str = ""

    @property
    def is_active(self) -> bool:
        return self.state in ACTIVE

    def as_json(self) -> dict[str, str]:
        return asdict(self)


def submit(job_file: Path) -> int:
    """Queue the job; its number. Raises MachineError if SLURM refuses the job, does not answer, or is not here."""
    # What make exports for its own recipe would reach the run through the job's environment.
    env = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "TYPED_", "MFLAGS"))}
    said = call("sbatch", "--parsable", str(job_file), env=env)
    return int(said.splitlines()[-1].split(";")[0])


def look(job: int) -> JobState:
    """The job as SLURM knows it now. Raises MachineError if SLURM does not answer, or is not here."""
    try:
        columns = "|".join(COLUMNS.values())
        said = call("squeue", "--noheader", "--states=all", f"--jobs={job}", f"--format=%i|{columns}")
    except MachineError as error:
        if "Invalid job id" in error.what:  # it ended a while ago
            return JobState()
        raise
    # A job with a generation server has a line for each part: 17+0 are the trainers.
    first = min(said.strip().splitlines(), default="")
    return JobState(**dict(zip(COLUMNS, first.split("|")[1:], strict=False)))


def end(job: int) -> None:
    """End the job, or take it out of the queue: SIGTERM, and SIGKILL a while later."""
    call("scancel", str(job))


def ask_to_stop(job: int) -> None:
    """Send SIGTERM to the job's own process alone. It forwards it, and has all the time it needs for a checkpoint."""
    call("scancel", "--batch", "--signal=TERM", str(job))


def requeue(job: int) -> None:
    """Requeue this job."""
    call("scontrol", "requeue", str(job))


def is_cut_off(job: int) -> bool:
    """True when SLURM ends the job for another one or for its time limit. False where it cannot be asked."""
    try:
        said = call("scontrol", "--oneliner", "show", "job", str(job)).split()
    except MachineError:
        return False
    is_preempted = any(word.startswith("PreemptTime=") and word != "PreemptTime=None" for word in said)
    return is_preempted or "JobState=TIMEOUT" in said


def call(*argv: str, env: Mapping[str, str] | None = None) -> str:
    """What the command prints. Raises MachineError if it failed, gave no answer, or is not on this machine."""
    try:
        done = subprocess.run(
            argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except FileNotFoundError:
        fix = "use a machine of a SLURM cluster, or `make train`"
        raise MachineError(f"{argv[0]} is not on this machine", where="SLURM", fix=fix) from None
    except subprocess.TimeoutExpired:
        fix = "look at `sinfo`, and try again"
        raise MachineError(f"{argv[0]} has not answered for {LIMIT_S:.0f} s", where="SLURM", fix=fix) from None
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or f"{argv[0]} ended with {done.returncode}").splitlines()
        fix = "ask for what `sinfo` offers" if argv[0] == "sbatch" else "look at `squeue` and `sinfo`"
        raise MachineError("\n".join(said[-5:]), where="SLURM", fix=fix)
    return done.stdout


LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets")
PASS = ("pass@1", "pass", "exact_match")  # names of the share of right answers, in the files of an evaluation

SHOWN = (
    "SLURM", "CUDA", "NVIDIA", "NCCL", "GLOO", "MASTER_", "OMP_", "HF_", "TRANSFORMERS_", "TORCH", "PYTHON", "WANDB_",
    "SFTPLAY_", "PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_", "HOSTNAME",
)  # fmt: skip
SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD")


def write_environment(job: JobFolder) -> None:
    """Write the variables on which a run may depend to env.txt; none whose name speaks of a secret."""
    shown = {key: value for key, value in os.environ.items() if key.startswith(SHOWN)}
    lines = [f"{key}={shown[key]}" for key in sorted(shown) if not any(part in key.upper() for part in SECRET)]
    write_text(job.path / ENVIRONMENT, "\n".join(lines) + "\n")


def write_summary(job: JobFolder, *, processes: int, exit_code: int | None) -> None:
    """Write job_summary.txt. `exit_code` is None while the job runs."""
    facts = [*_list_facts(job, processes=processes), ("exit code", "still running" if exit_code is None else exit_code)]
    lines = [f"{name + ':':<18}{value}" for name, value in facts if value not in (None, "")]
    for path in (job.server_log, job.log) if exit_code and exit_code < 128 else ():
        if path.exists():
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - 8192))
                last = file.read().decode("utf-8", "replace").splitlines()[-20:]
            lines += ["", f"the last lines of {path.name}:", *last]
    write_text(job.path / SUMMARY, "\n".join(lines) + "\n")


def _list_facts(job: JobFolder, *, processes: int) -> Iterator[tuple[str, Any]]:
    folder, lives, versions = RunFolder(job.run), job.lives(), library_versions()
    status, metrics = folder.read_json("status.json"), read_lines(folder.metrics)[0]
    yield "job id", job.job
    yield "run", job.run
    nodes = os.environ.get("SLURM_JOB_NUM_NODES") or 1
    yield "nodes", f"{nodes} ({os.environ.get('SLURM_JOB_NODELIST') or platform.node()})"
    yield "partition", os.environ.get("SLURM_JOB_PARTITION", "")
    machine = read_object(job.run / "manifest.json").get("machine") or {}
    names = ", ".join(str(gpu["name"]) for gpu in machine.get("gpus", ()))
    number = os.environ.get("SLURM_GPUS_ON_NODE") or os.environ.get("SLURM_GPUS_PER_NODE") or "0"
    yield "GPUs", f"{number} on this node{f': {names}' if names else ''}"
    yield "processes", f"{processes} on each node"
    named = [f"{name} {versions[name]}" for name in LIBRARIES if name in versions]
    yield "versions", ", ".join([f"sftplay {__version__}", f"python {platform.python_version()}", *named])
    yield "start", lives[0]["start"] if lives else time.strftime("%Y-%m-%dT%H:%M:%S%z")
    yield "end", lives[-1]["end"] if lives else ""
    ended = [f"{life['from_step']}-{life['to_step']} ({life['exit_code']})" for life in lives]
    yield "lives", f"{len(lives)}: steps (exit code) {', '.join(ended)}" if lives else ""
    yield "state", status.get("state")
    yield "steps", status.get("step", 0)
    seconds = sum(life["seconds"] for life in lives)
    made = sum(life["to_step"] - life["from_step"] for life in lives)
    yield "steps/h", f"{3600 * made / seconds:.1f}" if seconds else None
    for name, key in (("last loss", "loss"), ("last reward", "reward"), ("last true reward", "true_reward")):
        yield name, next((line[key] for line in reversed(metrics) if line.get(key) is not None), None)
    files = sorted(folder.eval.glob("*.json"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    shares = ((path, name, read_object(path).get(name)) for path in files for name in PASS)
    found = next((share for share in shares if isinstance(share[2], float | int)), None)
    yield "last pass@1", found and f"{found[2]:.3f} ({found[1]} in {found[0].parent.name}/{found[0].name})"
    peaks = [line[key] for line in metrics for key in ("peak_bytes", "peak_rss_bytes") if key in line]
    yield "peak memory", format_bytes(max(peaks)) if peaks else None
    yield "last checkpoint", status.get("last_checkpoint")
    complete = [path.parent.name for path in folder.checkpoints.glob("checkpoint-*/COMPLETE.json")]
    yield "checkpoints", ", ".join(sorted(complete, key=lambda name: int(name.rpartition("-")[2])))
    error = status.get("error") or {}
    yield "error", error.get("what", "").split("\n")[0]
    yield "note", job.note.replace("\n", "; ")
