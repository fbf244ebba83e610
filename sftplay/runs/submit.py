"""Submit a run as a SLURM job, with the plan of its nodes and the jobs that go on with it."""

from __future__ import annotations

import os
import shlex
import sys
import time
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from sftplay import log
from sftplay.atomic import locked, write_text
from sftplay.config.load import load_config
from sftplay.config.resolved import dump_given
from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError, MachineError, SftplayError
from sftplay.launch.generation_server import starts_server
from sftplay.launch.run_folder import RunFolder, find_run, has_begun, new_folder
from sftplay.launch.slurm.job import (
    ACTIVE,
    CONFIG,
    JOB_FILE,
    JOBS,
    LOCK,
    JobFolder,
    add_job,
    ask_state,
    call,
    call_sbatch,
    newest_job,
    run_job,
)
from sftplay.launch.slurm.request import JobRequest, in_our_names, job_file
from sftplay.machine.releases import VLLM_INSTALL
from sftplay.places import find_python
from sftplay.plan.sizing import split_batch
from sftplay.runs.inputs import check_inputs, needs_no_hub
from sftplay.runs.start import refuse_restarts


@dataclass(frozen=True)
class Submission:
    """A job that could be queued, with the text of its job file."""

    cfg: RunConfig
    request: JobRequest
    folder: RunFolder
    text: str


def prepare(args: Namespace, request: JobRequest) -> Submission:
    """Check config, inputs and request, and choose the run's folder. Raise SftplayError where the run could not begin
    in the job.
    """
    request.check()
    cfg = check_config(args, request)
    if starts_server(cfg):
        if find_python() is None:
            fix = f"{VLLM_INSTALL}, or write grpo.generation: transformers"
            raise MachineError("vLLM is not installed", where="grpo.generation", fix=fix)
        request = replace(request, server_gpus=cfg.grpo.vllm.tensor_parallel)
    elif request.server_sbatch:
        fix = "leave it out; or write grpo.generation: vllm_server, without grpo.vllm.url"
        raise ConfigError("the job starts no generation server", where="--server-sbatch", fix=fix)
    name = cfg.run_name
    if cfg.train.resume != "never" and has_begun(cfg, args.config):
        folder = find_run(cfg, args.config, run=name)
    else:
        folder = new_folder(cfg, args.config, claim=not args.dry_run)
    folder = RunFolder(folder.path.absolute())
    cfg = cfg.with_values({"run_name": folder.name}, "submit") if name is None else cfg
    launcher_args = tuple(args.launcher_args)
    text = job_file(request, folder.path, chdir=Path.cwd(), python=sys.executable, launcher_args=launcher_args)
    return Submission(cfg, request, folder, text)


def check_config(args: Namespace, request: JobRequest) -> RunConfig:
    """Return the job's config after all checks that do not need the job's machine. Raise SftplayError where a value or
    an input is wrong, or is not on this machine.
    """
    world_size = request.nodes * request.processes
    overrides, notes = in_our_names(args.overrides, world_size=world_size)
    cfg = load_config(args.config, overrides)
    for note in notes:
        log.say(f"note: {note}", "submit")
    is_online = os.environ.get("HF_HUB_OFFLINE") == "0"
    checked = check_inputs(cfg, asks_hub=is_online)
    if not is_online and not needs_no_hub(checked):
        what = f"the job runs without a network, and {cfg.model.name} or its data are not on this machine"
        fix = f"make download-model MODEL={cfg.model.name}; or set HF_HUB_OFFLINE=0 where the nodes have a network"
        raise MachineError(what, where=cfg.describe_origin("model.name", unset="model"), fix=fix)
    refuse_restarts(cfg, nnodes=request.nodes)
    split_batch(cfg, world_size, has_gpu=True)
    return cfg


def submit(job: Submission) -> int:
    """Queue the job and record it in the run's folder; return its number. Raise ConfigError where the run has a job
    already, and MachineError where SLURM refuses the job; nothing is left of it then.
    """
    folder = job.folder.path
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / LOCK):
        earlier = newest_job(folder)
        if earlier and (state := ask_state(earlier.job)["state"]) in ACTIVE:  # two jobs would write into the same files
            what = f"the run {folder.name!r} has the job {earlier.job}, which is {state}"
            fix = f"make cancel RUN={name_run(folder)}, or choose another run_name"
            raise ConfigError(what, where=str(folder), fix=fix)
        files = (folder / CONFIG, folder / JOB_FILE)
        before = {path: path.read_text() for path in files if path.exists()}
        try:
            write_text(folder / CONFIG, dump_given(job.cfg))
            write_text(folder / JOB_FILE, job.text)
            number = call_sbatch(folder / JOB_FILE)
        except SftplayError:
            for path in files:
                if path in before:
                    write_text(path, before[path])
                else:
                    path.unlink(missing_ok=True)
            if [path.name for path in folder.iterdir()] == [LOCK]:
                (folder / LOCK).unlink()
                folder.rmdir()
            raise
        add_job(folder, number, nodes=job.request.nodes, nproc=job.request.processes)
    return number


def run_here(args: Namespace, environment: Mapping[str, str]) -> int:
    """Train in the job that this process runs in, which `sbatch` of a file has started; return the trainer's exit code.

    Without `run_name` the run is named by the config and the job, so that it is the same after a requeue. Raise
    SftplayError where this is no job, or as `prepare`.
    """
    if not environment.get("SLURM_JOB_ID", "").isdecimal():
        fix = "leave out --here, and the job is queued; or start it by sbatch workflows/slurm/train.sbatch"
        raise ConfigError("this is no job of SLURM", where="--here", fix=fix)
    job, nodes = int(environment["SLURM_JOB_ID"]), int(environment.get("SLURM_JOB_NUM_NODES", "1"))
    gpus = environment.get("SLURM_GPUS_ON_NODE", "")
    nproc = args.nproc or (int(gpus) if gpus.isdecimal() else None)
    request = JobRequest(nodes=nodes, nproc=nproc)
    cfg = check_config(args, request)
    if cfg.run_name is None:
        cfg = cfg.with_values({"run_name": f"{Path(args.config).stem}-job{job}"}, "submit")
    has_server = starts_server(cfg)
    if has_server and environment.get("SLURM_HET_SIZE") != "2":
        fix = "use make submit; or sbatch OPTIONS : OPTIONS workflows/slurm/train.sbatch; or set grpo.vllm.url"
        raise ConfigError("the job has no node for the generation server", where="grpo.generation", fix=fix)
    folder = Path(cfg.output_dir).absolute() / str(cfg.run_name)
    last = newest_job(folder)
    if last is None or last.job != job:  # the job's first attempt
        if not has_begun(cfg, args.config) or cfg.train.resume == "never":
            new_folder(cfg, args.config)
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / CONFIG, dump_given(cfg))
        add_job(folder, job, nodes=nodes, nproc=request.processes)
    return run_job(folder, nproc=request.processes, launcher_args=args.launcher_args, has_server=has_server)


def find_job(output: Path, run: str | None) -> JobFolder:
    """Return the newest job of a run, by the run's name or folder. Raise ConfigError where there is no such run, or it
    has no job.
    """
    places = [Path(run), output / run] if run else []
    for place in places:
        if job := newest_job(place.absolute()):
            return job
    if found := [place for place in places if (place / "status.json").exists()]:
        fix = f"look at it with make status RUN={name_run(found[0])}"
        raise ConfigError(f"the run {run!r} was not submitted", where=str(output), fix=fix)
    known = ", ".join(job.run.name for job in all_jobs(output)[:5])
    fix = f"name one with RUN=: {known}" if known else "queue one first: make submit CONFIG=..."
    raise ConfigError(f"no run {run!r} with a job" if run else "no run is named", where=str(output), fix=fix)


def name_run(folder: Path) -> str:
    """Return what RUN= calls a run where no config names its output folder: its name in outputs/, else its path."""
    is_usual = folder.absolute().parent == Path("outputs").absolute()
    return shlex.quote(folder.name if is_usual else str(folder))


def all_jobs(output: Path) -> list[JobFolder]:
    """Return the newest job of each run below the output folder, the latest first."""
    records = sorted(output.absolute().glob(f"*/{JOBS}"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    folders = [path.parent for path in records if not path.parent.is_symlink()]  # `latest` is one of them
    return [job for folder in folders if (job := newest_job(folder))]


def cancel(job: JobFolder, *, wait_s: float) -> bool:
    """End the job, after its checkpoint where it runs; return False when it had ended before.

    A job that has not stopped after `wait_s` seconds is ended by SLURM.
    """
    state = ask_state(job.job)["state"]
    if state not in ACTIVE:
        return False

    def wait(limit_s: float, states: tuple[str, ...] = ACTIVE) -> None:
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline and ask_state(job.job)["state"] in states:
            time.sleep(0.5)

    if state == "RUNNING" and wait_s:
        # SIGTERM to the job's own process alone: it forwards it, and has all the time it needs for a checkpoint.
        call("scancel", "--batch", "--signal=TERM", str(job.job))
        log.say(f"job {job.job}: the run stops with a checkpoint", "cancel")
        wait(wait_s)
    if ask_state(job.job)["state"] in ACTIVE:
        call("scancel", str(job.job))  # SIGTERM, and SIGKILL a while later
    wait(120.0, (*ACTIVE, "COMPLETING"))  # SLURM may take so long to clean up behind a job
    return True
