"""What became of a job: its state beside that of its run, and its end."""

from __future__ import annotations

import time
from typing import Any

from sftplay import log
from sftplay.launch.run_folder import RunFolder
from sftplay.launch.slurm import scheduler
from sftplay.launch.slurm.records import JobFolder

POLL_S = 0.5
END_S = 120.0
"""How long SLURM may take to clean up behind a job."""


def describe(job: JobFolder) -> dict[str, Any]:
    """The job as SLURM knows it, and its run as it stands in its folder."""
    run, state = RunFolder(job.run).read_json("status.json"), scheduler.look(job.job)
    return {
        "run": job.run.name,
        "job_id": job.job,
        **state.as_json(),
        "run_state": run.get("state"),
        "step": run.get("step"),
        "exit_code": run.get("exit_code"),
        "last_checkpoint": run.get("last_checkpoint"),
        "lives": job.lives(),
        "note": job.note,
        "log": str(job.log),
    }


def as_text(facts: dict[str, Any]) -> str:
    """The facts of `describe` in a line or a few."""
    reason = f" ({facts['reason']})" if facts["reason"] not in ("", "None") else ""
    parts = [f"{facts['run']}: job {facts['job_id']} {facts['state'] or 'has left the queue'}{reason}"]
    parts += [f"on {facts['nodes']}"] if facts["nodes"] else []
    parts += [f"{facts['left']} left"] if facts["state"] == "RUNNING" else []
    if facts["run_state"]:
        code = f" with {facts['exit_code']}" if facts["exit_code"] is not None else ""
        parts.append(f"run {facts['run_state']}{code} at step {facts['step'] or 0}")
    lives = [f"{len(facts['lives'])} lives have ended"] if len(facts["lives"]) > 1 else []
    lines = [", ".join(parts + lives)]
    lines += [f"  {line}" for line in facts["note"].splitlines()]
    return "\n".join(lines)


def cancel(job: JobFolder, *, wait_s: float) -> bool:
    """End the job, after its checkpoint where it runs; False when it had ended before.

    A job that has not stopped after `wait_s` seconds is ended by SLURM.
    """
    state = scheduler.look(job.job)
    if not state.is_active:
        return False
    if state.state == "RUNNING" and wait_s:
        scheduler.ask_to_stop(job.job)
        log.say(f"job {job.job}: the run stops with a checkpoint", "cancel")
        deadline = time.monotonic() + wait_s
        while scheduler.look(job.job).is_active and time.monotonic() < deadline:
            time.sleep(POLL_S)
    if scheduler.look(job.job).is_active:
        scheduler.end(job.job)
    deadline = time.monotonic() + END_S
    while _is_there(scheduler.look(job.job)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return True


def _is_there(state: scheduler.JobState) -> bool:
    return state.is_active or state.state == "COMPLETING"
