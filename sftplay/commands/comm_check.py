"""The verb `comm-check`: starts processes as a run would, measures their exchange, and prints the table."""

from __future__ import annotations

import json
import tempfile
from argparse import Namespace
from pathlib import Path

from sftplay import log
from sftplay.config.load import load_config
from sftplay.errors import ConfigError, MachineError
from sftplay.launch.command.command import Scale
from sftplay.machine.probe import Machine, probe
from sftplay.plan.sizing.communication import nominal_link
from sftplay.runs.comm_check import (
    LIMIT_S,
    NODES_LIMIT_S,
    as_lines,
    build_check,
    describe_exchanges,
    gradient_bytes,
    run_check,
)
from sftplay.runs.start import print_command, read_scale


def comm_check(args: Namespace) -> int:
    """`comm-check`: a table of all-reduces and its verdict.

    Raises:
        ConfigError: values are given, but no config to set them in.
        RunError: a rank did not come or has gone, or a sum is wrong.
    """
    if args.overrides and not args.config:
        what = f"comm-check has no config to set {args.overrides[0]!r} in"
        raise ConfigError(what, where="command line", fix="name one with CONFIG=")
    machine = probe()
    scale = _scale(args, machine)
    cfg = load_config(args.config, args.overrides) if args.config else None
    if args.dry_run:
        return print_command(build_check(Path("FOLDER"), scale, machine=machine, cfg=cfg), args)
    gradients = gradient_bytes(cfg, machine, scale=scale) if cfg else None
    limit_s = LIMIT_S if scale.nnodes == 1 else NODES_LIMIT_S
    with tempfile.TemporaryDirectory(prefix="comm-check-") as name:
        launch = build_check(Path(name), scale, machine=machine, cfg=cfg, limit_s=limit_s)
        measured = run_check(launch, Path(name), scale=scale, limit_s=limit_s)
    nominal, link = nominal_link(machine, scale.nproc, nnodes=scale.nnodes)
    report = describe_exchanges(measured, scale, nominal_bytes_per_s=nominal, link=link, gradients=gradients)
    if args.json:
        print(json.dumps(report))
    elif args.node_rank == 0:
        for line in as_lines(report):
            log.show(line)
    return 0


def _scale(args: Namespace, machine: Machine) -> Scale:
    """The scale of a run. Where no number of processes is given, it is one per GPU, or two on a CPU."""
    if args.nproc in (None, ""):
        args.nproc = "gpu" if machine.gpus else "2"
    scale = read_scale(args, machine)
    if scale.world_size == 1:
        raise MachineError(
            "one process has nobody to exchange with",
            where="--nproc",
            fix="check where there is a second GPU, or several nodes with NNODES=2",
        )
    return scale
