"""The verbs `submit`, `logs` and `cancel`: a run as a job of a cluster."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from argparse import Namespace
from pathlib import Path

from sftplay import log
from sftplay.commands.status import refuse_watched_json
from sftplay.config.load import load_config
from sftplay.errors import ConfigError
from sftplay.launch.run_folder import RunFolder
from sftplay.launch.slurm.job import JOB_FILE
from sftplay.launch.slurm.request import JobRequest
from sftplay.runs import submit as submitting
from sftplay.runs.status import describe_job_line, describe_runs
from sftplay.runs.submit import cancel as cancel_job


def submit(args: Namespace) -> int:
    """`submit`: queue the run of a config as a job; with --here, train in the job that this is called in."""
    if args.here:
        return submitting.run_here(args, os.environ)
    job = submitting.prepare(args, read_request(args))
    answer = {"job_id": None, "run": str(job.folder.path), "job_file": str(job.folder.path / JOB_FILE)}
    if args.dry_run:
        print(json.dumps({**answer, "text": job.text}) if args.json else job.text, end="\n" if args.json else "")
        return 0
    number = submitting.submit(job)
    if args.json:
        print(json.dumps({**answer, "job_id": number}))
    else:
        name = submitting.name_run(job.folder.path)
        log.say(
            f"job {number} is queued: make status RUN={name}, make logs RUN={name}, make cancel RUN={name}", "submit"
        )
    return 0


def read_request(args: Namespace) -> JobRequest:
    options = {}
    for flag, text in (("--sbatch", args.sbatch), ("--server-sbatch", args.server_sbatch)):
        try:
            options[flag] = tuple(shlex.split(text))
        except ValueError as error:
            raise ConfigError(f"cannot be split into words ({error})", where=flag, fix="close the quotes") from None
    return JobRequest(
        nodes=args.nodes, gpus_per_node=args.gpus_per_node, gres=args.gres, time=args.time, partition=args.partition,
        nproc=args.nproc, setup=Path(args.setup) if args.setup else None, sbatch=options["--sbatch"],
        server_sbatch=options["--server-sbatch"],
    )  # fmt: skip


def logs(args: Namespace) -> int:
    """`logs`: the last lines of a run's job; with --watch also those to come."""
    refuse_watched_json(args)
    job = submitting.find_job(_output(args), args.run)
    files = [path for path in (job.output, job.server_log, job.log) if path.exists()]
    if args.json:
        print(json.dumps({"run": job.run.name, "job_id": job.job, "files": list(map(str, files))}))
    elif files:
        return subprocess.call(["tail", "-n", str(args.n), *(["-F"] if args.watch else []), *map(str, files)])
    else:
        log.show(describe_job_line(describe_runs([job.run])[0]))
    return 0


def cancel(args: Namespace) -> int:
    """`cancel`: stop the job of a run with a checkpoint, or take it out of the queue."""
    job = submitting.find_job(_output(args), args.run)
    was_there = cancel_job(job, wait_s=0 if args.fast else args.wait)
    ended = RunFolder(job.run).read_json("status.json")
    facts = {"run": job.run.name, "job_id": job.job, "cancelled": was_there}
    facts |= {key: ended.get(key) for key in ("step", "last_checkpoint")}
    if args.json:
        print(json.dumps(facts))
    else:
        how = "has ended" if was_there else "had ended before"
        saved = f"; its last checkpoint is {facts['last_checkpoint']}" if facts["last_checkpoint"] else ""
        log.say(f"job {job.job} {how}{saved}", "cancel")
    return 0


def _output(args: Namespace) -> Path:
    return Path(load_config(args.config, args.overrides).output_dir if args.config else "outputs")
