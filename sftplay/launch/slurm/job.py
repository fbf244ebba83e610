"""The process of a job on its first node: starts the trainer, forwards stop signals, and queues the job again.

The job file becomes this process. SLURM tells it of the end to come by SIGUSR1, of a cancellation by SIGTERM. It ends
with the trainer's own exit code. It trains nothing and imports no torch.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sftplay.atomic import is_locked, write_text
from sftplay.errors import MachineError
from sftplay.launch.run_folder import RunFolder
from sftplay.launch.slurm import scheduler
from sftplay.launch.slurm.records import CONFIG, NOTE, JobFolder, add_job, newest_job
from sftplay.launch.slurm.summary import write_environment, write_summary
from sftplay.launch.supervise.processes import children_of, end_launch
from sftplay.signals import STOP_SIGNALS, catch_signals, popen_tied

PR_SET_CHILD_SUBREAPER = 36
STOP_CODES = tuple(128 + number for number in STOP_SIGNALS)

LOCK_WAIT_S = 180.0
"""How long a job that was queued again waits for the processes of its former life, perhaps on another node."""

IDLE_LIVES = 3
"""A job that has made no step in so many lives, one after the other, is not queued again."""


@dataclass(frozen=True)
class Allocation:
    """What SLURM has given to this job."""

    job: int
    nodes: int
    restarts: int
    master_addr: str
    master_port: int
    cpus_per_task: str

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Allocation:
        """From the variables of a job. The nodes meet on this one, which is the first, unless MASTER_ADDR is set."""
        return cls(
            job=int(environment["SLURM_JOB_ID"]),
            nodes=int(environment.get("SLURM_JOB_NUM_NODES", "1")),
            restarts=int(environment.get("SLURM_RESTART_COUNT", "0")),
            master_addr=environment.get("MASTER_ADDR") or socket.gethostname(),
            master_port=int(environment.get("MASTER_PORT", "29511")),
            cpus_per_task=environment.get("SLURM_CPUS_PER_TASK", ""),
        )


def trainer_command(run: Path, allocation: Allocation, *, nproc: int, launcher_args: Sequence[str] = ()) -> list[str]:
    """The command of the trainer: the kit itself on one node, one kit on each of several nodes by srun."""
    behind = ["--", *launcher_args] if launcher_args else []
    words = ["train", "--config", str(run / CONFIG), "--nproc", str(nproc)]
    if allocation.restarts:
        words.append("train.resume=auto")
    if allocation.nodes == 1:
        return [sys.executable, "-m", "sftplay", *words, *behind]
    words += ["--nnodes", str(allocation.nodes), "--master-addr", allocation.master_addr]
    words += ["--master-port", str(allocation.master_port)]
    nodes = str(allocation.nodes)
    srun = ["srun", "--mpi=none", "--export=ALL", "--kill-on-bad-exit=0", f"--nodes={nodes}", f"--ntasks={nodes}"]
    srun += ["--ntasks-per-node=1"]
    if allocation.cpus_per_task:  # since 22.05 srun does not take it over from sbatch
        srun.append(f"--cpus-per-task={allocation.cpus_per_task}")
    # The first words of the shell's list are the verb and its config; the number of the node comes behind the verb.
    shell = 'exec "$0" -m sftplay "$1" --node-rank "$SLURM_NODEID" "${@:2}"'
    return [*srun, "bash", "-c", shell, sys.executable, *words, *behind]


class Forwarder:
    """Forwards the first stop signal to the trainer. SLURM itself ends a job that takes too long after that."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self.process: subprocess.Popen[bytes] | None = None

    def attach(self, process: subprocess.Popen[bytes], *, is_srun: bool) -> None:
        """Forward to this process from now on, and also what came before it started."""
        self.process, self._is_srun = process, is_srun
        if self.received:
            self._forward(self.received[0])

    def on_signal(self, number: int, _frame: Any) -> None:
        self.received.append(number)
        if len(self.received) == 1 and self.process:
            self._forward(number)

    def _forward(self, number: int) -> None:
        assert self.process is not None
        say(f"{signal.Signals(number).name}: the run stops with a checkpoint")
        # srun forwards SIGUSR1 to all nodes. A SIGTERM it takes for itself (slurm, srun_job.c).
        self.process.send_signal(signal.SIGUSR1 if self._is_srun else number)


def main(arguments: list[str]) -> int:
    """Run the job of the run folder that is named; the trainer's exit code."""
    parser = ArgumentParser(prog="job")
    parser.add_argument("run", type=Path)
    parser.add_argument("--nproc", type=int, default=1)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    args = parser.parse_args(arguments[:end])
    return run_job(args.run, nproc=args.nproc, launcher_args=arguments[end + 1 :])


def run_job(run: Path, *, nproc: int, launcher_args: Sequence[str] = ()) -> int:
    """One life of the job, from its start to its end or the next requeue."""
    forwarder = Forwarder()
    catch_signals(forwarder.on_signal)
    _adopt_orphans()
    allocation = Allocation.of(os.environ)
    job, folder = JobFolder(run, allocation.job), RunFolder(run)
    job.path.mkdir(parents=True, exist_ok=True)
    if (newest := newest_job(run)) is None or newest.job != job.job:  # started by sbatch, and not by `submit`
        add_job(run, job.job, nodes=allocation.nodes, nproc=nproc)
    write_environment(job)
    if allocation.restarts:
        _await_former_life(folder)
    begun, began_s, attempts = _now(), time.monotonic(), len(folder.read_json("status.json").get("attempts", []))
    write_summary(job, processes=nproc, exit_code=None)
    argv = trainer_command(run, allocation, nproc=nproc, launcher_args=launcher_args)
    where = f"job {job.job}, life {allocation.restarts + 1}: {allocation.nodes} node(s), {nproc} process(es) on each"
    code = _train(job, argv, where=where, forwarder=forwarder)
    for pid in children_of(os.getpid()):  # the trainer has ended; what it has left would keep the node busy
        end_launch(pid)
    if signal.SIGTERM in forwarder.received and code in STOP_CODES:
        code = 128 + signal.SIGTERM
    names = [signal.Signals(number).name for number in forwarder.received]
    from_step, to_step = steps_of_life(folder, attempts_before=attempts)
    job.add_life(
        start=begun, end=_now(), seconds=round(time.monotonic() - began_s, 3), from_step=from_step, to_step=to_step,
        exit_code=code, signals=names,
    )  # fmt: skip
    write_summary(job, processes=nproc, exit_code=code)
    if is_to_go_on(code, job):
        _requeue(job, nproc=nproc, code=code)
    say(f"ended with {code}; {job.path} has the summary")
    return code


def is_to_go_on(code: int, job: JobFolder) -> bool:
    """True when the job must be queued again: it was told of its end, or makes room for another job."""
    return code == 128 + signal.SIGUSR1 or (code == 128 + signal.SIGTERM and scheduler.is_preempted(job.job))


def steps_of_life(folder: RunFolder, *, attempts_before: int) -> tuple[int, int]:
    """From which step to which the attempts of this life have come; twice the same step where there was none."""
    status = folder.read_json("status.json")
    step, attempts = int(status.get("step") or 0), status.get("attempts", [])[attempts_before:]
    if not attempts:
        return step, step
    last = attempts[-1].get("to_step")
    return int(attempts[0].get("from_step") or 0), int(step if last is None else last)


def _train(job: JobFolder, argv: Sequence[str], *, where: str, forwarder: Forwarder) -> int:
    with job.log.open("ab", buffering=0) as log:
        log.write(f"[job] {_now()} {where}\n".encode())
        say(f"{where}; {job.log} has its lines")
        try:
            process = popen_tied(argv, output=log)
        except FileNotFoundError as error:
            log.write(f"[job] {error}\n".encode())
            return MachineError.exit_code
        forwarder.attach(process, is_srun=argv[0] == "srun")
        code = process.wait()
    return code if code >= 0 else 128 - code


def _requeue(job: JobFolder, *, nproc: int, code: int) -> None:
    idle = job.lives()[-IDLE_LIVES:]
    if len(idle) == IDLE_LIVES and all(life["to_step"] == life["from_step"] for life in idle):
        problem = f"no step was made in {IDLE_LIVES} lives: the job's time is too short. Ask for more time"
    else:
        say("back into the queue")
        try:
            scheduler.requeue(job.job)
            return
        except MachineError as error:
            problem = f"stopped with a checkpoint, and not queued again ({error.what})"
    fix = "go on with: make submit CONFIG=... ARGS='run_name=" + job.run.name + " train.resume=auto'"
    say(f"{problem}\n  fix: {fix}")
    write_text(job.path / NOTE, f"{problem}\n{fix}\n")
    write_summary(job, processes=nproc, exit_code=code)


def _await_former_life(folder: RunFolder) -> None:
    """Wait until nobody holds the run's lock: a node that was lost may still have processes for a while."""
    deadline = time.monotonic() + LOCK_WAIT_S
    while is_locked(folder.path / ".lock") and time.monotonic() < deadline:
        time.sleep(0.5)


def _adopt_orphans() -> None:
    """Become the parent of every process below whose own parent dies, so that none outlives the job unseen."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def say(text: str) -> None:
    """A line into the file that SLURM keeps of the job."""
    sys.stdout.write(f"[job] {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
