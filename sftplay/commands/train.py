"""The verbs that train: from a config to a run folder, a command and its exit code."""

from __future__ import annotations

import os
from argparse import Namespace
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from sftplay.atomic import write_text
from sftplay.config.load import load_config
from sftplay.config.resolved import dump_resolved
from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError, SftplayError
from sftplay.launch.command import ADDRESS
from sftplay.launch.run_folder import RunFolder, has_begun, new_folder
from sftplay.log import CLUSTER_NAMES
from sftplay.machine.probe import probe
from sftplay.runs.inputs import check_inputs
from sftplay.runs.start import (
    archive_earlier_start,
    archive_if_refused,
    build_command,
    print_command,
    read_scale,
    run_workers,
    say_sizing,
    size,
    write_plan,
)
from sftplay.runs.strategy_setup import with_deepspeed

if TYPE_CHECKING:
    from sftplay.launch.nodes import Rendezvous


def train(args: Namespace) -> int:
    """`train`: start the run of a config, or continue it where train.resume asks for that; `resume`: continue it."""
    if args.nnodes == 1 or args.dry_run:
        return _train(args, None)
    from sftplay.runs.nodes import among_nodes

    return among_nodes(args, partial(_train, args))


def _train(args: Namespace, rendezvous: Rendezvous | None) -> int:
    cfg = with_deepspeed(load_config(args.config, args.overrides), is_asked=args.deepspeed)
    if args.verb == "resume":
        cfg = cfg.with_values({"train.resume": "auto"}, "resume") if cfg.train.resume == "never" else cfg
    elif args.documents and not cfg.learns_documents:
        where = cfg.describe_origin("task_mode", unset=args.config)
        fix = "write task_mode: cpt, or cpt_mixed with chats next to them; or use make train"
        raise ConfigError(f"{cfg.task_mode} does not learn documents", where=where, fix=fix)
    elif cfg.train.resume == "never" or (cfg.train.resume == "auto" and not has_begun(cfg, args.config)):
        return launch(args, cfg, rendezvous=rendezvous)
    from sftplay.runs.resume import continue_run

    return continue_run(args, cfg, rendezvous=rendezvous)


def launch(
    args: Namespace, cfg: RunConfig, *, folder: RunFolder | None = None, rendezvous: Rendezvous | None = None
) -> int:
    """Size the run, create its folder (a new one where none is given), start the workers and follow them."""
    machine = probe()
    scale = read_scale(args, machine)
    cfg = check_inputs(cfg, asks_hub=not args.dry_run)
    sized = size(cfg, machine, scale=scale)
    if cfg.rewards and not args.dry_run:
        from sftplay.runs.reward_check import try_rewards

        try_rewards(cfg)
    folder = folder or new_folder(cfg, args.config, claim=not args.dry_run)
    try:
        command = build_command(sized.cfg, folder, scale=scale, machine=machine)
    except SftplayError:
        with suppress(OSError):  # only an empty folder is removed: one that `new_folder` has made
            folder.path.rmdir()
        raise
    if args.dry_run:
        return print_command(command, args)
    archive_earlier_start(folder)
    with folder.locked(), archive_if_refused(folder, is_alone=rendezvous is None):
        folder.create()
        probed = {"decision": "none", "why": "there is no GPU"}
        if machine.gpus:
            from sftplay.runs.memory_probe import ProbeTarget, size_by_probe

            target = ProbeTarget(machine, scale.nproc, folder.logs)
            sized, probed = size_by_probe(sized, target, resize=lambda fit: size(cfg, machine, scale=scale, fit=fit))
        say_sizing(sized, machine, folder=folder)
        write_text(folder.resolved, dump_resolved(sized.cfg))
        write_plan(folder, sized, probe=probed)
        return run_workers(command, folder, cfg=sized.cfg, args=args, rendezvous=rendezvous)


def train_ray(args: Namespace) -> int:
    """`train-ray`: train on the cluster of RAY_ADDRESS, or on one that is started here."""
    if numbers := [name for name in args.strays if name in CLUSTER_NAMES or name.startswith("TORCHELASTIC_")]:
        what = f"this is a process of another launch, which has set {', '.join(numbers)}"
        raise ConfigError(what, where="train-ray", fix="call it once, from a shell that no launcher has started")
    if args.workers == 1:
        raise ConfigError("one process needs no Ray", where="--workers", fix="use `make train`, or ask for --workers 2")
    args.overrides.append("cluster.launcher=ray")
    args.nproc, args.nnodes, args.node_rank, args.master_addr, args.master_port = str(args.workers), 1, 0, "", None
    args.documents, args.is_elsewhere = False, ADDRESS in os.environ
    return train(args)
