"""The generation server of a job: a step on a node of its own. It and the trainer end together."""

from __future__ import annotations

import signal
import subprocess
from contextlib import suppress
from typing import Any

from sftplay.launch.generation_server import FollowedServer, ServerProcess
from sftplay.launch.slurm.scheduler import CONFIG, JobFolder
from sftplay.launch.supervise.processes import end_launch

GROUP = 1  # the server's node in a heterogeneous job; the trainers' nodes are group 0
LATE_S = 2.0  # a trainer may fail for want of the server before the end of the server's step is known here


def start_server_step(job: JobFolder) -> ServerProcess:
    """Start the server's step of this job. Its lines go to the job's `generation_server.log`."""
    srun = ["srun", "--mpi=none", "--export=ALL", f"--het-group={GROUP}", "--nodes=1", "--ntasks=1"]
    return ServerProcess(job.run / CONFIG, job.server, log=job.server_log, runner=srun)


def follow_trainer(server: FollowedServer, trainer: subprocess.Popen[Any]) -> int:
    """The trainer's exit code. A trainer that has lost the server is stopped, and killed if it does not stop."""

    def wait(seconds: float | None) -> bool:
        with suppress(subprocess.TimeoutExpired):
            trainer.wait(seconds)
        return trainer.poll() is not None

    def stop(number: int) -> None:
        if number == signal.SIGKILL:
            end_launch(trainer.pid)
        else:
            trainer.send_signal(number)

    server.follow(wait=wait, stop=stop)
    if trainer.wait():
        server.await_end(LATE_S)
    return trainer.returncode
