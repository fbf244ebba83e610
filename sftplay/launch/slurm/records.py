"""What jobs leave in a run's folder: the job file, the queued jobs, and a folder for each job with its lives.

A life is the time from a job's start to its end or its next requeue. The names of all these files begin with `slurm`,
and they stay where they are when a start without a step is set aside.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sftplay.atomic import read_lines

JOB_FILE, CONFIG, JOBS, LOCK = "slurm.sbatch", "slurm.yaml", "slurm.jsonl", "slurm.lock"
"""In the run's folder: the job file, the config as it was submitted, a line for each queued job, and a lock."""

LOG, SUMMARY, ENVIRONMENT = "training_output.log", "job_summary.txt", "env.txt"
LIVES, NOTE = "lives.jsonl", "requeue_failed.txt"
SERVER, SERVER_LOG = "generation_server.url", "generation_server.log"


@dataclass(frozen=True)
class JobFolder:
    """`slurm-<JOBID>/` in a run's folder."""

    run: Path
    job: int

    @property
    def path(self) -> Path:
        return self.run / f"slurm-{self.job}"

    @property
    def output(self) -> Path:
        """What the job's shell and SLURM itself have written."""
        return self.run / f"slurm-{self.job}.out"

    @property
    def log(self) -> Path:
        return self.path / LOG

    @property
    def server(self) -> Path:
        """The address of the job's generation server, which is there while one answers."""
        return self.path / SERVER

    @property
    def server_log(self) -> Path:
        return self.path / SERVER_LOG

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
