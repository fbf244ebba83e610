"""A trial's run as a job of SLURM, which a sweep asks and stops as it does a process."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from pathlib import Path

from sftplay.atomic import write_text
from sftplay.errors import ConfigError, MachineError
from sftplay.launch.run_folder import RunFolder
from sftplay.launch.slurm.job import ACTIVE, ask_state, call, newest_job
from sftplay.launch.slurm.request import JobRequest
from sftplay.runs.submit import prepare, submit

ASK_S, SILENT_S = 5.0, 600.0  # between two questions; how long SLURM may give no answer to them
PRESENT = (*ACTIVE, "COMPLETING")  # a job that is requeued is completing before it is pending again
STOPPED = 143  # the code of a run whose job was cancelled before it had begun


class TrialJob:
    """The job of a run: the one that a killed sweep has left, else a new one.

    It has the methods of a process that the sweep uses. What a process would print as its answer is written to the file
    `answer`.
    """

    def __init__(self, config: Path, folder: RunFolder, request: JobRequest, *, answer: Path) -> None:
        self.returncode: int | None = None
        self._folder, self._answer, self._asked_s = folder, answer, time.monotonic()
        self._answered_s = self._asked_s
        job = newest_job(folder.path.absolute())
        if job is None or ask_state(job.job)["state"] not in PRESENT:
            words = Namespace(config=str(config), overrides=["train.resume=auto"], dry_run=False, launcher_args=[])
            try:
                submit(prepare(words, request))
            except ConfigError as error:
                self.returncode = error.exit_code
                write_text(answer, json.dumps({"error": error.as_json()}))
            job = newest_job(folder.path.absolute())
        self._job = job

    def poll(self) -> int | None:
        """Return the run's exit code; None while its job waits or runs. SLURM is asked every few seconds."""
        now = time.monotonic()
        if self.returncode is not None or self._job is None or now - self._asked_s < ASK_S:
            return self.returncode
        self._asked_s = now
        try:
            state = ask_state(self._job.job)["state"]
        except MachineError:
            if now - self._answered_s > SILENT_S:
                raise
            return None
        self._answered_s = now
        if state not in PRESENT:
            attempts = self._job.lives()
            self.returncode = int(attempts[-1]["exit_code"]) if attempts else STOPPED
            self._write_answer()
        return self.returncode

    def _write_answer(self) -> None:
        """Write how the run has failed, by the last error in the job's lines: a refused start leaves no status."""
        assert self._job is not None
        lines = self._job.log.read_text(errors="replace").splitlines() if self._job.log.exists() else []
        fixes = [n for n, line in enumerate(lines) if line.startswith("  fix: ") and n]
        error = {"code": (self._folder.read_json("status.json").get("error") or {}).get("code")}
        if fixes:
            error |= {"what": lines[fixes[-1] - 1], "fix": lines[fixes[-1]].removeprefix("  fix: ")}
        write_text(self._answer, json.dumps({"run": str(self._folder.path), "error": error}))

    def send_signal(self, _number: int) -> None:
        """Stop the run with a checkpoint; a job that waits leaves the queue."""
        if self._job and ask_state(self._job.job)["state"] == "RUNNING":
            call("scancel", "--batch", "--signal=TERM", str(self._job.job))
        else:
            self.kill()

    def kill(self) -> None:
        """End the job at once."""
        if self._job:
            call("scancel", str(self._job.job))

    def wait(self) -> int:
        """Wait for the job's end; return the run's exit code."""
        while (code := self.poll()) is None:
            time.sleep(ASK_S / 2)
        return code
