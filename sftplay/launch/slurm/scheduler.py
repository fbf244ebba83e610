"""The commands of SLURM: sbatch, squeue, scancel, scontrol. What they refuse is told in their own words."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from sftplay.errors import MachineError

LIMIT_S = 60.0
"""How long a command may take to answer."""

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
    """Queue the job; its number.

    Raises:
        MachineError: SLURM refuses the job, does not answer, or is not here.
    """
    # What make exports for its own recipe would reach the run through the job's environment.
    env = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "TYPED_", "MFLAGS"))}
    said = call("sbatch", "--parsable", str(job_file), env=env)
    return int(said.splitlines()[-1].split(";")[0])


def look(job: int) -> JobState:
    """The job as SLURM knows it now.

    Raises:
        MachineError: SLURM does not answer, or is not here.
    """
    try:
        said = call(
            "squeue", "--noheader", "--states=all", f"--jobs={job}", f"--format=%i|{'|'.join(COLUMNS.values())}"
        )
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
    """Put this job back into the queue."""
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
    """What the command prints.

    Raises:
        MachineError: it failed, gave no answer, or is not on this machine.
    """
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
