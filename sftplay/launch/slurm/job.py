"""The process of a job on its first node: starts trainer and generation server, forwards signals, requeues."""

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
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sftplay.atomic import is_locked, write_text
from sftplay.errors import MachineError, SftplayError
from sftplay.launch.generation_server import FollowedServer, ServerProcess, client_environment
from sftplay.launch.nodes import TOKEN
from sftplay.launch.processes import end_launch, list_children
from sftplay.launch.run_folder import RunFolder
from sftplay.launch.slurm import scheduler
from sftplay.launch.slurm.scheduler import CONFIG, JobFolder
from sftplay.machine.ports import JOB_PORTS
from sftplay.signals import STOP_SIGNALS, Forwarder, catch_signals, popen_tied

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


PR_SET_CHILD_SUBREAPER = 36
STOP_CODES = tuple(128 + number for number in STOP_SIGNALS)

LOCK_WAIT_S = 180.0  # how long a requeued job waits for the processes of its previous attempt, perhaps on another node
OTHERS_S = 30.0  # how long the trainers of the other nodes may take to end behind this node's
IDLE_ATTEMPTS = 3  # a job that has made no step in so many attempts, one after the other, is not queued again


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
    command = [sys.executable, "-m", "sftplay", "train", "--node-rank", "0", "--config", str(run / scheduler.CONFIG)]
    command += ["--nproc", str(nproc)]
    if allocation.nodes > 1:
        command += ["--nnodes", str(allocation.nodes), "--master-addr", allocation.master_addr]
        command += ["--master-port", str(allocation.master_port)]
    command += ["train.resume=auto"] if allocation.restarts else []
    return [*command, "--", *launcher_args] if launcher_args else command


def others_command(trainer: Sequence[str], allocation: Allocation) -> list[str]:
    """The command that starts `trainer`, this node's, on all other nodes; empty where there are none.

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
    return [*srun, "bash", "-c", shell, trainer[0], *trainer[6:]]


def new_forwarder() -> Forwarder:
    """Forward the first stop signal to the trainer. SLURM itself ends a job that takes too long after that."""

    def forward(process: subprocess.Popen[bytes], number: int) -> None:
        say(f"{signal.Signals(number).name}: the run stops with a checkpoint")
        process.send_signal(number)

    return Forwarder(forward)


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
    """One attempt of the job, from its start to its end or the next requeue; the trainer's exit code."""
    forwarder = new_forwarder()
    catch_signals(forwarder.on_signal)
    if sys.platform == "linux":  # no process below whose parent dies may outlive the job unseen
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)
    allocation = Allocation.of(os.environ)
    os.environ["MASTER_PORT"] = str(allocation.master_port)  # env.txt shows it
    job, folder = JobFolder(run, allocation.job), RunFolder(run)
    job.path.mkdir(parents=True, exist_ok=True)
    if (newest := scheduler.newest_job(run)) is None or newest.job != job.job:  # started by sbatch, and not by `submit`
        scheduler.add_job(run, job.job, nodes=allocation.nodes, nproc=nproc)
    scheduler.write_environment(job)
    deadline = time.monotonic() + LOCK_WAIT_S
    while allocation.restarts and is_locked(folder.path / ".lock") and time.monotonic() < deadline:
        time.sleep(0.5)  # a node that was lost may still have processes for a while
    start, start_s, n_before = _format_now(), time.monotonic(), len(folder.read_json("status.json").get("attempts", []))
    scheduler.write_summary(job, processes=nproc, exit_code=None)
    what = f"job {job.job}, attempt {allocation.restarts + 1}: {allocation.nodes} node(s), {nproc} process(es) on each"
    say(f"{what}; {job.log} has its lines")
    with job.log.open("a") as log:
        log.write(f"[job] {start} {what}\n")
    trainer = trainer_command(run, allocation, nproc=nproc, launcher_args=launcher_args)
    others = others_command(trainer, allocation)
    code = (_train_with_server if has_server else _train)(job, trainer, others=others, forwarder=forwarder)
    for pid in list_children(os.getpid()):  # the trainer has ended; what it has left would keep the node busy
        end_launch(pid)
    if signal.SIGTERM in forwarder.received and code in STOP_CODES:  # it may have come behind the notice
        code = 128 + signal.SIGTERM
    status = folder.read_json("status.json")
    step, attempts = int(status.get("step") or 0), status.get("attempts", [])[n_before:]
    first, last = (attempts[0].get("from_step") or 0, attempts[-1].get("to_step")) if attempts else (step, step)
    job.add_life(
        start=start, end=_format_now(), seconds=round(time.monotonic() - start_s, 3), from_step=int(first),
        to_step=int(step if last is None else last), exit_code=code,
        signals=[signal.Signals(number).name for number in forwarder.received],
    )  # fmt: skip
    scheduler.write_summary(job, processes=nproc, exit_code=code)
    # Its time is over, or will soon be, or another job takes its place.
    if code == 128 + signal.SIGUSR1 or (code == 128 + signal.SIGTERM and scheduler.is_cut_off(job.job)):
        _requeue(job, nproc=nproc, code=code)
    say(f"ended with {code}; {job.path} has the summary")
    return code


def _train_with_server(job: JobFolder, trainer: Sequence[str], *, others: Sequence[str], forwarder: Forwarder) -> int:
    """As `_train`, next to a generation server. Whichever ends first, the other one is ended too."""
    try:
        process = start_server_step(job)
    except FileNotFoundError as error:
        say(f"{error}: the generation server cannot be started")
        return MachineError.exit_code
    server = FollowedServer(process.look, is_stopping=lambda: bool(forwarder.received))
    code, url = 0, ""
    try:
        if url := server.await_address():
            say(f"the generation server answers at {url}; {job.server_log} has its lines")
            env, wait = client_environment(url, os.environ), partial(follow_trainer, server)
            code = _train(job, trainer, others=others, forwarder=forwarder, env=env, wait=wait)
        server.check()
    except SftplayError as error:
        say(f"{error.what}; {job.server_log} has its lines")
        code = error.exit_code
    finally:
        process.end()
    if forwarder.received and code not in STOP_CODES and (server.lost is not None or not url):
        return 128 + forwarder.received[0]
    return code


def _train(
    job: JobFolder,
    trainer: Sequence[str],
    *,
    others: Sequence[str],
    forwarder: Forwarder,
    env: Mapping[str, str] | None = None,
    wait: Callable[[subprocess.Popen[bytes]], int] = subprocess.Popen.wait,
) -> int:
    env = {TOKEN: secrets.token_hex(16), **(env or {})}  # srun hands it to the other nodes
    with job.log.open("ab", buffering=0) as log:
        try:
            elsewhere = popen_tied(others, output=log, env=env) if others else None
        except FileNotFoundError as error:
            say(f"{error}: the other nodes cannot be started")
            return MachineError.exit_code
        process = popen_tied(trainer, output=log, env=env)
        forwarder.attach(process)
        code = wait(process)
        if elsewhere:
            for end in (elsewhere.terminate, elsewhere.kill):
                try:
                    elsewhere.wait(OTHERS_S)
                    break
                except subprocess.TimeoutExpired:
                    end()
    return code if code >= 0 else 128 - code


def _requeue(job: JobFolder, *, nproc: int, code: int) -> None:
    idle = job.lives()[-IDLE_ATTEMPTS:]
    if len(idle) == IDLE_ATTEMPTS and all(life["to_step"] == life["from_step"] for life in idle):
        problem = f"no step was made in {IDLE_ATTEMPTS} attempts: the job's time is too short. Ask for more time"
    else:
        say("requeued")
        try:
            scheduler.requeue(job.job)
            return
        except MachineError as error:
            problem = f"stopped with a checkpoint, and not queued again ({error.what})"
    fix = "go on with: make submit CONFIG=... ARGS='run_name=" + job.run.name + " train.resume=auto'"
    say(f"{problem}\n  fix: {fix}")
    write_text(job.path / scheduler.NOTE, f"{problem}\n{fix}\n")
    scheduler.write_summary(job, processes=nproc, exit_code=code)


def _format_now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def say(text: str) -> None:
    """A line into the file that SLURM keeps of the job; a signal's handler may say one inside another."""
    os.write(1, f"[job] {text}\n".encode())  # a buffered stream refuses a re-entrant call


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
