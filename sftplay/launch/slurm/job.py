"""The process of a job on its first node: starts the trainer, forwards stop signals, and queues the job again.

The job file becomes this process. SLURM tells it of the end to come by SIGUSR1, of a cancellation by SIGTERM. It ends
with the trainer's own exit code. It trains nothing and imports no torch.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sftplay.atomic import is_locked, write_text
from sftplay.errors import MachineError, SftplayError
from sftplay.launch.generation_server import client_environment
from sftplay.launch.nodes.rendezvous import TOKEN
from sftplay.launch.run_folder import RunFolder
from sftplay.launch.slurm import scheduler
from sftplay.launch.slurm.scheduler import (
    CONFIG,
    NOTE,
    JobFolder,
    add_job,
    newest_job,
    write_environment,
    write_summary,
)
from sftplay.launch.slurm.server import ServerStep
from sftplay.launch.supervise.processes import children_of, end_launch
from sftplay.machine.ports import JOB_PORTS
from sftplay.signals import STOP_SIGNALS, catch_signals, popen_tied

PR_SET_CHILD_SUBREAPER = 36
STOP_CODES = tuple(128 + number for number in STOP_SIGNALS)

LOCK_WAIT_S = 180.0
"""How long a job that was queued again waits for the processes of its former life, perhaps on another node."""

OTHERS_S = 30.0
"""How long the trainers of the other nodes may take to end behind this node's."""

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
        job = int(environment["SLURM_JOB_ID"])
        return cls(
            job=job,
            nodes=int(environment.get("SLURM_JOB_NUM_NODES", "1")),
            restarts=int(environment.get("SLURM_RESTART_COUNT", "0")),
            master_addr=environment.get("MASTER_ADDR") or socket.gethostname(),
            master_port=int(environment.get("MASTER_PORT") or JOB_PORTS[job % len(JOB_PORTS)]),
            cpus_per_task=environment.get("SLURM_CPUS_PER_TASK", ""),
        )


def trainer_command(run: Path, allocation: Allocation, *, nproc: int, launcher_args: Sequence[str] = ()) -> list[str]:
    """The command of the trainer on this node."""
    own = [sys.executable, "-m", "sftplay", "train", "--node-rank", "0"]
    return [*own, *_words(run, allocation, nproc=nproc, launcher_args=launcher_args)]


def others_command(run: Path, allocation: Allocation, *, nproc: int, launcher_args: Sequence[str] = ()) -> list[str]:
    """The command that starts the trainers of all nodes but this one; empty where there are none.

    This node's trainer is no task of srun: a signal to it alone then stops the run, because the ranks agree. What srun
    forwards may reach every process of a task, and torchrun dies of it.
    """
    nodes = str(allocation.nodes - 1)
    if nodes == "0":
        return []
    srun = ["srun", "--mpi=none", "--export=ALL", "--kill-on-bad-exit=0", "--relative=1", f"--nodes={nodes}"]
    srun += [f"--ntasks={nodes}", "--ntasks-per-node=1"]
    if allocation.cpus_per_task:  # since 22.05 srun does not take it over from sbatch
        srun.append(f"--cpus-per-task={allocation.cpus_per_task}")
    shell = 'exec "$0" -m sftplay train --node-rank "$((SLURM_NODEID + 1))" "$@"'
    words = _words(run, allocation, nproc=nproc, launcher_args=launcher_args)
    return [*srun, "bash", "-c", shell, sys.executable, *words]


def _words(run: Path, allocation: Allocation, *, nproc: int, launcher_args: Sequence[str]) -> list[str]:
    words = ["--config", str(run / CONFIG), "--nproc", str(nproc)]
    if allocation.nodes > 1:
        words += ["--nnodes", str(allocation.nodes), "--master-addr", allocation.master_addr]
        words += ["--master-port", str(allocation.master_port)]
    words += ["train.resume=auto"] if allocation.restarts else []
    return [*words, "--", *launcher_args] if launcher_args else words


class Forwarder:
    """Forwards the first stop signal to the trainer. SLURM itself ends a job that takes too long after that."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None

    def attach(self, process: subprocess.Popen[bytes]) -> None:
        """Forward to this process from now on, and also what came before it started."""
        self._process = process
        if self.received:
            self._forward(self.received[0])

    def on_signal(self, number: int, _frame: Any) -> None:
        self.received.append(number)
        if len(self.received) == 1:
            self._forward(number)

    def _forward(self, number: int) -> None:
        if self._process:
            say(f"{signal.Signals(number).name}: the run stops with a checkpoint")
            self._process.send_signal(number)


def main(arguments: list[str]) -> int:
    """Run the job of the run folder that is named; the trainer's exit code."""
    parser = ArgumentParser(prog="job")
    parser.add_argument("run", type=Path)
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--server", action="store_true", help="with a generation server on a node of its own")
    end = arguments.index("--") if "--" in arguments else len(arguments)
    args = parser.parse_args(arguments[:end])
    return run_job(args.run, nproc=args.nproc, launcher_args=arguments[end + 1 :], has_server=args.server)


def run_job(run: Path, *, nproc: int, launcher_args: Sequence[str] = (), has_server: bool = False) -> int:
    """One life of the job, from its start to its end or the next requeue."""
    forwarder = Forwarder()
    catch_signals(forwarder.on_signal)
    _adopt_orphans()
    allocation = Allocation.of(os.environ)
    os.environ["MASTER_PORT"] = str(allocation.master_port)  # env.txt shows it
    job, folder = JobFolder(run, allocation.job), RunFolder(run)
    job.path.mkdir(parents=True, exist_ok=True)
    if (newest := newest_job(run)) is None or newest.job != job.job:  # started by sbatch, and not by `submit`
        add_job(run, job.job, nodes=allocation.nodes, nproc=nproc)
    write_environment(job)
    if allocation.restarts:
        _await_former_life(folder)
    begun, began_s, attempts = _now(), time.monotonic(), len(folder.read_json("status.json").get("attempts", []))
    write_summary(job, processes=nproc, exit_code=None)
    what = f"job {job.job}, life {allocation.restarts + 1}: {allocation.nodes} node(s), {nproc} process(es) on each"
    say(f"{what}; {job.log} has its lines")
    with job.log.open("a") as log:
        log.write(f"[job] {begun} {what}\n")
    own, others = (
        build(run, allocation, nproc=nproc, launcher_args=launcher_args) for build in (trainer_command, others_command)
    )
    code = (_train_with_server if has_server else _train)(job, own, others=others, forwarder=forwarder)
    for pid in children_of(os.getpid()):  # the trainer has ended; what it has left would keep the node busy
        end_launch(pid)
    if signal.SIGTERM in forwarder.received and code in STOP_CODES:  # it may have come behind the notice
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
    """True when the job must be queued again: its time is over, or will soon be, or another job takes its place."""
    return code == 128 + signal.SIGUSR1 or (code == 128 + signal.SIGTERM and scheduler.is_cut_off(job.job))


def steps_of_life(folder: RunFolder, *, attempts_before: int) -> tuple[int, int]:
    """From which step to which the attempts of this life have come; twice the same step where there was none."""
    status = folder.read_json("status.json")
    step, attempts = int(status.get("step") or 0), status.get("attempts", [])[attempts_before:]
    if not attempts:
        return step, step
    last = attempts[-1].get("to_step")
    return int(attempts[0].get("from_step") or 0), int(step if last is None else last)


def _train_with_server(job: JobFolder, own: Sequence[str], *, others: Sequence[str], forwarder: Forwarder) -> int:
    """As `_train`, beside a generation server. Whichever ends first, the other one is ended too."""
    try:
        server = ServerStep(job, is_stopping=lambda: forwarder.received)
    except FileNotFoundError as error:
        say(f"{error}: the generation server cannot be started")
        return MachineError.exit_code
    code, url = 0, ""
    try:
        if url := server.await_address():
            say(f"the generation server answers at {url}; {job.server_log} has its lines")
            env = client_environment(url, os.environ)
            code = _train(job, own, others=others, forwarder=forwarder, env=env, wait=server.follow)
        server.check()
    except SftplayError as error:
        say(f"{error.what}; {job.server_log} has its lines")
        code = error.exit_code
    finally:
        server.end()
    if forwarder.received and code not in STOP_CODES and (server.is_lost or not url):
        return 128 + forwarder.received[0]
    return code


def _train(
    job: JobFolder,
    own: Sequence[str],
    *,
    others: Sequence[str],
    forwarder: Forwarder,
    env: Mapping[str, str] | None = None,
    wait: Callable[[subprocess.Popen[bytes]], int] = subprocess.Popen.wait,
) -> int:
    env = {TOKEN: secrets.token_hex(16), **(env or {})}  # srun hands it to the other nodes
    with job.log.open("ab", buffering=0) as log:
        elsewhere = None
        try:
            elsewhere = popen_tied(others, output=log, env=env) if others else None
        except FileNotFoundError as error:
            say(f"{error}: the other nodes cannot be started")
            return MachineError.exit_code
        process = popen_tied(own, output=log, env=env)
        forwarder.attach(process)
        code = wait(process)
        if elsewhere:
            _await_others(elsewhere)
    return code if code >= 0 else 128 - code


def _await_others(srun: subprocess.Popen[bytes]) -> None:
    """Wait for the trainers of the other nodes, which end by themselves when this node's has ended."""
    for limit_s, end in ((OTHERS_S, srun.terminate), (OTHERS_S, srun.kill)):
        try:
            srun.wait(limit_s)
            return
        except subprocess.TimeoutExpired:
            end()


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
    """A line into the file that SLURM keeps of the job; a signal's handler may say one inside another."""
    os.write(1, f"[job] {text}\n".encode())  # a buffered stream refuses a re-entrant call


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
