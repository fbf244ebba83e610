"""The verb `sweep`: one config with many values, a table of what came out, and the config of the best."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path

from sftplay import log
from sftplay.config.data import has_held_out
from sftplay.config.load import load_config
from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError, MachineError, RunError
from sftplay.launch.slurm.request import JobRequest
from sftplay.units import plural

OTHER_FIGURES = ("data.", "datasets.", "model.name", "model.max_seq_len", "cpt.", "eval.")
"""Keys below these change what is held out, or its tokens."""


def sweep(args: Namespace) -> int:
    """`sweep`: train all trials that are left, in this process's turn; show the table when none is."""
    base = load_config(args.config, args.overrides)
    name = args.name or base.run_name or Path(args.config).stem
    _check(base, name)
    from sftplay.runs.sweep_space import read_space

    space = read_space(args, base)
    for axis in space.axes:
        if axis.key.startswith(OTHER_FIGURES):
            log.say(f"note: {axis.key} may change what is measured: figures of such trials may not compare", "sweep")
    from sftplay.commands.slurm import read_request
    from sftplay.runs.sweep import BEST, Sweep

    request = read_request(args)
    if not args.submit and request != JobRequest(nproc=args.nproc):
        what = "nodes, GPUs and options of jobs are given, and no trial is a job"
        raise ConfigError(what, where="command line", fix="add --submit, or leave them out")
    request.check()
    work = Sweep(args, base, space, name=name, request=request if args.submit else None)
    log.say(f"sweep {work.folder}: {plural(space.n_trials, 'trial')}, {space.sampler}", "sweep")
    code = work.run()
    rows = work.publish()
    best = work.best(rows)
    from sftplay.report.sweep import build_table, describe_savings, write_page

    page = write_page(work.folder, rows, metric=space.metrics[0], is_less_better=space.is_less_better)
    is_open = any(row["state"] in ("running", "waiting", "stopped") for row in rows)
    failure = None
    if not code and best is None and not is_open:
        what = f"none of {plural(len(rows), 'trial')} has a figure; the first: {rows[0]['cause']}"
        fix = "change the config or the values, and choose another NAME="
        failure = RunError(what, where=str(work.folder), fix=fix)
    if args.json and failure is None:
        answer = {"sweep": str(work.folder), "metric": space.metrics[0], "trials": rows, "best": best}
        answer |= {"report": str(page), "best_config": str(work.folder / BEST) if best else None}
        print(json.dumps(answer, ensure_ascii=False))
    elif not args.json:
        log.show(build_table(rows, metric=space.metrics[0], is_less_better=space.is_less_better).format())
        if savings := describe_savings(rows):
            log.say(savings, "sweep")
    if code:
        log.say("stopped; the same command goes on", "sweep")
    elif failure:
        raise failure
    else:
        so_far = " so far, other processes train on" if is_open else ""
        log.say(f"best{so_far}: {work.folder / BEST if best else 'none yet'}; all: {page}", "sweep")
    return code


def _check(base: RunConfig, name: str) -> None:
    if find_spec("optuna") is None:
        raise MachineError("the package optuna is not installed", where="sweep", fix="make install EXTRAS=sweep")
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,100}", name):
        fix = "use letters, digits, `_`, `.` and `-`"
        raise ConfigError(f"{name!r} cannot be the name of a sweep", where="--name", fix=fix)
    if not has_held_out(base) and not base.task.measures_training_rows:
        where = base.describe_origin("data.split", unset="")
        what = "holds out nothing, and trials compare by what is held out"
        raise ConfigError(what, where=where, fix="give data.val_path, or a data.split above 0")
    if base.train.resume not in ("never", "auto"):
        where = base.describe_origin("train.resume", unset="")
        raise ConfigError("each trial of a sweep starts anew", where=where, fix="remove it")
