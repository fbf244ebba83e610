"""The verb `job-file`: a run as a job file for SkyPilot, dstack or Kubernetes. Nothing is launched."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

from sftplay import log
from sftplay.atomic import check_new_file, write_text
from sftplay.control.jobs.plan_job import plan_job
from sftplay.launch.job_files import job_text


def job_file(args: Namespace) -> int:
    """`job-file`: print the file, or write it to --out."""
    job = plan_job(args)
    text = job_text(args.kind, job)
    if args.out:
        check_new_file(Path(args.out))
        write_text(Path(args.out), text)
    if args.json:
        facts = {"kind": args.kind, "name": job.name, "nodes": job.nodes, "gpus": job.gpus, "gpu": job.gpu}
        print(json.dumps({**facts, "out": args.out, "text": text}))
    elif args.out:
        log.say(f"{args.out}: {job.nodes} node(s) with {job.gpus} x {job.gpu}", "job-file")
    else:
        print(text, end="")
    return 0
