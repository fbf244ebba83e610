"""The verbs that measure several devices: `comm-check`, `gpu-check`."""

from __future__ import annotations

import json
import tempfile
from argparse import Namespace
from pathlib import Path

from sftplay import log
from sftplay.config.load import load_config
from sftplay.errors import ConfigError, MachineError, RunError, suggest
from sftplay.machine.probe import probe
from sftplay.plan.communication import nominal_link
from sftplay.runs.comm_check import (
    LIMIT_S,
    NODES_LIMIT_S,
    as_lines,
    build_check,
    describe_exchanges,
    gradient_bytes,
    run_check,
)
from sftplay.runs.gpu_check import checks
from sftplay.runs.gpu_check.check import Check
from sftplay.runs.gpu_check.conduct import JSON_FILE, MARKDOWN_FILE, STATES, Row, Table, conduct
from sftplay.runs.start import print_command, read_scale
from sftplay.signals import StopAtOnce, Stopped


def comm_check(args: Namespace) -> int:
    """`comm-check`: a table of all-reduces and its verdict."""
    machine = probe()
    if args.nproc in (None, ""):
        args.nproc = "gpu" if machine.gpus else "2"
    scale = read_scale(args, machine)
    if scale.world_size == 1:
        fix = "check where there is a second GPU, or several nodes with NNODES=2"
        raise MachineError("one process has nobody to exchange with", where="--nproc", fix=fix)
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


def gpu_check(args: Namespace) -> int:
    """`gpu-check`: a row for each check on the screen and in both files; code 5 when one has failed."""
    stop = StopAtOnce(of_make=True)
    stop.install()
    try:
        return run_table(args, list(checks.CHECKS), module=checks.__name__)
    except Stopped as signal:
        log.show(f"stopped by {signal}; the rows so far are in {args.out}")
        return 128 + stop.received


def run_table(args: Namespace, table: list[Check], *, module: str) -> int:
    """Run the checks of `table`, the CHECKS of `module`, as far as `--only` names them."""
    chosen = select(table, args.only)
    out = Path(args.out)
    if out.exists() and not out.is_dir():
        raise ConfigError("is a file, and the table needs a folder", where=str(out), fix="name a folder with OUT=")
    found = Table(probe(), out)
    found.save()  # a folder that cannot be written is refused before the first check

    def note(row: Row) -> None:
        found.save(row)
        log.show(f"{STATES[row.state]:<18} {row.name}: {row.figure or row.why} ({row.seconds:.0f} s)")

    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        conduct(chosen, Path(scratch), module=module, is_fast=args.fast, note=note)
    if args.json:
        print(json.dumps(found.as_dict(), ensure_ascii=False))
    log.show(found.summary())
    log.show(f"the table: {out / MARKDOWN_FILE}; to attach to a report: {out / JSON_FILE}")
    return RunError.exit_code if found.count("failed") else 0


def select(table: list[Check], only: str) -> list[Check]:
    """The checks whose names contain a word in `only`, with commas; all if it is empty. Unknown words: ConfigError."""
    words = [word.strip() for word in only.split(",") if word.strip()]
    names = [check.name for check in table]
    for word in words:
        if not any(word in name for name in names):
            fix, near = suggest(word, names, f"there are {', '.join(names)}")
            raise ConfigError(f"no check is called {word!r}", where="--only", fix=fix, nearest=near)
    return [check for check in table if not words or any(word in check.name for word in words)]
