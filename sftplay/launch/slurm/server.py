"""The generation server of a job: a step on a node of its own. It and the trainer end together."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from sftplay.errors import MachineError, RunError
from sftplay.launch.generation_server import host_command
from sftplay.launch.slurm.scheduler import CONFIG, JobFolder
from sftplay.launch.supervise.processes import end_launch
from sftplay.signals import popen_tied

GROUP = 1
"""The server's node in a heterogeneous job; the trainers' nodes are group 0."""

POLL_S = 0.3

CHECKPOINT_S = 60.0
"""How long a trainer without a server may take for a checkpoint. It can save one only if it is not drawing."""

LATE_S = 2.0
"""A trainer may fail for want of the server before the end of the server's step is known here."""

ENDING_S = 40.0
"""How long the server may take to end, before its step is killed."""


class ServerStep:
    """The server's step of this job, started when this is made. Its lines go to the job's `generation_server.log`."""

    def __init__(self, job: JobFolder, *, is_stopping: Callable[[], Any]) -> None:
        job.server.unlink(missing_ok=True)  # of a former life
        srun = ["srun", "--mpi=none", "--export=ALL", f"--het-group={GROUP}", "--nodes=1", "--ntasks=1"]
        self._address, self._is_stopping = job.server, is_stopping
        self.is_lost = False
        """True when the server has ended before the trainer."""
        with job.server_log.open("ab", buffering=0) as log:
            self._process = popen_tied([*srun, *host_command(job.run / CONFIG, job.server)], output=log)

    def await_address(self) -> str:
        """The address of the server when it answers. Empty when it has ended, or the job is to stop, before that.

        Raises SftplayError if the server has ended; the exit code is its own where that is one of the kit's.
        """
        while not self._is_stopping():
            if self._address.exists():
                return self._address.read_text(encoding="utf-8")
            if (code := self._process.poll()) is not None:
                kind = MachineError if code == MachineError.exit_code else RunError
                raise kind(f"the generation server has ended with {code} before it was ready")
            time.sleep(POLL_S)
        return ""

    def follow(self, trainer: subprocess.Popen[Any]) -> int:
        """The trainer's exit code. A trainer that has lost the server is stopped, and killed if it does not stop."""
        while trainer.poll() is None and self._process.poll() is None:
            time.sleep(POLL_S)
        if trainer.returncode:
            self.is_lost = self._has_ended_within(LATE_S)
        elif trainer.returncode is None:
            self.is_lost = True
            if not self._is_stopping():  # a second signal would end it at once
                trainer.terminate()
            with suppress(subprocess.TimeoutExpired):
                trainer.wait(CHECKPOINT_S)
            if trainer.poll() is None:
                end_launch(trainer.pid)
        return trainer.wait()

    def check(self) -> None:
        """Raise RunError where the trainer was stopped because the server had ended."""
        if self.is_lost and not self._is_stopping():
            raise RunError(f"the generation server has ended with {self._process.poll()} while the run trained")

    def end(self) -> None:
        """End the server, unless it has ended."""
        for end in (self._process.terminate, self._process.kill):
            end()
            if self._has_ended_within(ENDING_S):
                break
        self._address.unlink(missing_ok=True)

    def _has_ended_within(self, seconds: float) -> bool:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.poll() is not None
