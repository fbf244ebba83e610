"""A run as a job of SLURM: its records, the commands of the scheduler, and the process on the job's first node.

That process starts trainer and generation server, forwards signals and requeues the job.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sftplay import __version__
from sftplay.atomic import is_locked, read_lines, read_object, write_text
from sftplay.errors import MachineError, SftplayError, without_secrets
from sftplay.launch.generation_server import FollowedServer, ServerProcess, client_environment
from sftplay.launch.nodes import TOKEN
from sftplay.launch.processes import end_launch, list_children
from sftplay.launch.run_folder import RunFolder
from sftplay.machine.ports import JOB_PORTS
from sftplay.machine.probe import library_versions
from sftplay.signals import STOP_SIGNALS, Forwarder, catch_signals, popen_tied
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


def call_sbatch(job_file: Path) -> int:
    """Queue the job; its number. Raises MachineError if SLURM refuses the job, does not answer, or is not here."""
    # What make exports for its own recipe would reach the run through the job's environment.
    env = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "TYPED_", "MFLAGS"))}
    said = call("sbatch", "--parsable", str(job_file), env=env)
    return int(said.splitlines()[-1].split(";")[0])


def ask_state(job: int) -> dict[str, str]:
    """`ask_states` of one job."""
    return ask_states([job])[job]


def ask_states(jobs: Sequence[int]) -> dict[int, dict[str, str]]:
    """`COLUMNS` of each job as SLURM knows it now; all are empty where SLURM no longer knows it.

    Raises MachineError if SLURM does not answer, or is not here.
    """
    found, columns = {job: dict.fromkeys(COLUMNS, "") for job in jobs}, "|".join(COLUMNS.values())
    listed = ",".join(map(str, jobs))
    try:
        said = call("squeue", "--noheader", "--states=all", f"--jobs={listed}", f"--format=%i|{columns}")
    except MachineError as error:
        if "Invalid job id" not in error.what:
            raise
        # One that ended a while ago is refused by its number; in a list it is passed over, but for some versions.
        return {job: ask_states([job])[job] for job in jobs} if len(jobs) > 1 else found
    # A job with a generation server has a line for each part: 17+0 are the trainers.
    for line in sorted(said.strip().splitlines(), reverse=True):
        number = line.partition("|")[0].partition("+")[0]
        if number.isdecimal() and int(number) in found:
            found[int(number)] |= dict(zip(COLUMNS, line.split("|")[1:], strict=False))
    return found


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
        if "configuration source" in said[-1]:
            fix = "use a machine of a SLURM cluster (or set SLURM_CONF to its slurm.conf), or `make train`"
        raise MachineError("\n".join(said[-5:]), where="SLURM", fix=fix)
    return done.stdout


LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets")
PASS = ("pass@1", "pass", "exact_match")  # names of the share of right answers, in the files of an evaluation

SHOWN = (
    "SLURM", "CUDA", "NVIDIA", "NCCL", "GLOO", "MASTER_", "OMP_", "HF_", "TRANSFORMERS_", "TORCH", "PYTHON", "WANDB_",
    "SFTPLAY_", "PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_", "HOSTNAME",
)  # fmt: skip
SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD", "JWT")


def write_environment(job: JobFolder) -> None:
    """Write the variables on which a run may depend to env.txt; none whose name speaks of a secret."""
    shown = {key: value for key, value in os.environ.items() if key.startswith(SHOWN)}
    lines = [f"{key}={shown[key]}\n" for key in sorted(shown) if not any(part in key.upper() for part in SECRET)]
    write_text(job.path / ENVIRONMENT, without_secrets("".join(lines)))


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


GROUP = 1  # the server's node in a heterogeneous job; the trainers' nodes are group 0


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
        server.await_end(2.0)  # it may have failed for want of the server, whose end is known here a little later
    return trainer.returncode


PR_SET_CHILD_SUBREAPER = 36
STOP_CODES = tuple(128 + number for number in STOP_SIGNALS)

LOCK_WAIT_S = 180.0  # how long a requeued job waits for the processes of its previous attempt, perhaps on another node
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
    command = [sys.executable, "-m", "sftplay", "train", "--node-rank", "0", "--config", str(run / CONFIG)]
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
    if (newest := newest_job(run)) is None or newest.job != job.job:  # started by sbatch, and not by `submit`
        add_job(run, job.job, nodes=allocation.nodes, nproc=nproc)
    with _notes_at_best():
        write_environment(job)
    deadline = time.monotonic() + LOCK_WAIT_S
    while allocation.restarts and is_locked(folder.path / ".lock") and time.monotonic() < deadline:
        time.sleep(0.5)  # a node that was lost may still have processes for a while
    start, start_s, n_before = _format_now(), time.monotonic(), len(folder.read_json("status.json").get("attempts", []))
    with _notes_at_best():
        write_summary(job, processes=nproc, exit_code=None)
    what = f"job {job.job}, attempt {allocation.restarts + 1}: {allocation.nodes} node(s), {nproc} process(es) on each"
    say(f"{what}; {job.log} has its lines")
    with _notes_at_best(), job.log.open("a") as log:
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
    with _notes_at_best():
        job.add_life(
            start=start, end=_format_now(), seconds=round(time.monotonic() - start_s, 3), from_step=int(first),
            to_step=int(step if last is None else last), exit_code=code,
            signals=[signal.Signals(number).name for number in forwarder.received],
        )  # fmt: skip
        write_summary(job, processes=nproc, exit_code=code)
    # Its time is over, or will soon be, or another job takes its place.
    if code == 128 + signal.SIGUSR1 or (code == 128 + signal.SIGTERM and is_cut_off(job.job)):
        _requeue(job, nproc=nproc, code=code)
    say(f"ended with {code}; {job.path} has the summary")
    return code


@contextmanager
def _notes_at_best() -> Iterator[None]:
    """A full disk keeps neither the run from its start, nor the job from its code and its requeue."""
    try:
        yield
    except OSError as error:
        say(f"note: {error}")


def _train_with_server(job: JobFolder, trainer: Sequence[str], *, others: Sequence[str], forwarder: Forwarder) -> int:
    """As `_train`, next to a generation server. Whichever ends first, the other one is ended too."""
    try:
        srun = ["srun", "--mpi=none", "--export=ALL", f"--het-group={GROUP}", "--nodes=1", "--ntasks=1"]
        process = ServerProcess(job.run / CONFIG, job.server, log_file=job.server_log, runner=srun)
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
                    elsewhere.wait(30.0)  # the trainers of the other nodes end behind this node's
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
            call("scontrol", "requeue", str(job.job))
            return
        except MachineError as error:
            problem = f"stopped with a checkpoint, and not queued again ({error.what})"
    args = shlex.quote(shlex.join([f"run_name={job.run.name}", "train.resume=auto"]))
    fix = f"go on with: make submit CONFIG=... ARGS={args}"
    say(f"{problem}\n  fix: {fix}")
    with _notes_at_best():
        write_text(job.path / NOTE, f"{problem}\n{fix}\n")
        write_summary(job, processes=nproc, exit_code=code)


def _format_now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def say(text: str) -> None:
    """A line into the file that SLURM keeps of the job; a signal's handler may say one inside another."""
    os.write(1, f"[job] {text}\n".encode())  # a buffered stream refuses a re-entrant call


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
