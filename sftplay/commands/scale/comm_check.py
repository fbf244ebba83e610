"""The verb `comm-check`: starts processes as a run would, has them exchange, and says what that means for a run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sftplay import log
from sftplay.config.load import load_config
from sftplay.control.model_shape import known_shape
from sftplay.control.start import print_command, read_scale
from sftplay.errors import ConfigError, MachineError, RunError
from sftplay.launch.command.command import WORKER, Launch, Scale, build_launch
from sftplay.launch.command.network import list_interfaces, nccl_environment
from sftplay.launch.supervise.processes import end_launch
from sftplay.machine.probe import Machine, probe
from sftplay.model.start_point import resolve_names
from sftplay.plan.memory.execution import execution_of
from sftplay.plan.memory.step import standing_bytes
from sftplay.plan.sizing.communication import (
    BUCKET_BYTES,
    SIZES_BYTES,
    Exchange,
    exchange_s,
    nominal_link,
    turning_bytes,
)
from sftplay.plan.sizing.size_run import size_run
from sftplay.signals import popen_tied
from sftplay.units import format_bytes

RANK = "sftplay.tasks.rehearse.comm_check"

LIMIT_S = 180.0
"""How long all of it may take on one node; a start on slow disks takes most of it."""

NODES_LIMIT_S = 600.0
"""The same where other nodes must be started by hand, too."""

KEPT = Path(".cache")
"""Where the output of a check that failed is kept; its own folder goes with it."""


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
    if args.dry_run:
        check = build_check(Path("FOLDER"), scale, machine=machine)
        return print_command(_with_nccl(check, args, machine=machine), args)
    gradients = _gradients(args, machine, scale=scale)
    limit_s = LIMIT_S if scale.nnodes == 1 else NODES_LIMIT_S
    with tempfile.TemporaryDirectory(prefix="comm-check-") as name:
        launch = _with_nccl(build_check(Path(name), scale, machine=machine, limit_s=limit_s), args, machine=machine)
        found = run_check(launch, Path(name), scale=scale, limit_s=limit_s)
    nominal, link = nominal_link(machine, scale.nproc, nnodes=scale.nnodes)
    report = describe_exchanges(found, scale, nominal_bytes_per_s=nominal, link=link, gradients=gradients)
    if args.json:
        print(json.dumps(report))
    elif args.node_rank == 0:
        for line in as_lines(report):
            log.show(line)
    return 0


def build_check(folder: Path, scale: Scale, *, machine: Machine, limit_s: float = LIMIT_S) -> Launch:
    """The command of a run of this scale, with the check's rank in the worker's place."""
    launch = build_launch(folder, scale, has_gpu=bool(machine.gpus), is_offline=True)
    argv = tuple(RANK if word == WORKER else word for word in launch.argv)
    return replace(launch, argv=(*argv, f"{limit_s:g}"))


def _with_nccl(launch: Launch, args: Namespace, *, machine: Machine) -> Launch:
    """The launch with the variables of `cluster.nccl`, where a config is given.

    Raises:
        ConfigErrors: one is not there, or the environment has another.
    """
    if not args.config:
        return launch
    cfg, logs = load_config(args.config, args.overrides), Path(launch.argv[-2])
    ways = nccl_environment(cfg, logs, has_gpu=bool(machine.gpus), given=os.environ, interfaces=list_interfaces())
    return replace(launch, env={**launch.env, **ways})


def run_check(launch: Launch, folder: Path, *, scale: Scale, limit_s: float) -> dict[str, Any]:
    """What the ranks measured. After `limit_s` seconds all of them are ended.

    Raises:
        RunError: a rank did not come or has gone, or a sum is wrong.
    """
    with (folder / "output.txt").open("wb") as output:
        process = popen_tied(launch.argv, output=output, env=launch.env)
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                end_launch(process.pid)
                process.wait()
    first = scale.node_rank * scale.nproc
    notes = {rank: _read(folder / f"rank{rank}.json") for rank in range(first, first + scale.nproc)}
    if code == 0 and all(note.get("state") == "done" for note in notes.values()):
        return notes[first]
    told = (folder / "output.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    ending = f"within {limit_s:g} s" if code is None else f"; the launcher ended with code {code}"
    kept = _keep(folder / "output.txt", scale.node_rank) if told else None
    raise _failure(notes, ending, told=told[-1] if told and code is not None else "", kept=kept)


def describe_exchanges(
    found: dict[str, Any],
    scale: Scale,
    *,
    nominal_bytes_per_s: float | None,
    link: str,
    gradients: tuple[float, float] | None = None,
) -> dict[str, Any]:
    """The report: figures by size, and a verdict. `gradients` are the bytes of a config's gradients and of a bucket."""
    ranks = scale.world_size
    sweep = [Exchange(size, took) for size, took in zip(SIZES_BYTES, found["latencies_s"], strict=True)]
    report: dict[str, Any] = {
        "world_size": ranks,
        "backend": found["backend"],
        "device": found["device"],
        "nominal_bytes_per_s": nominal_bytes_per_s,
        "link": link,
        "sizes": [each.as_dict(ranks) for each in sweep],
        "fp16_hook": {"size_bytes": BUCKET_BYTES, "plain_s": found["plain_s"], "fp16_s": found["fp16_s"]},
        "gradients": None,
    }
    if gradients:
        total, bucket = gradients
        report["gradients"] = {
            "bytes": total, "bucket_bytes": bucket, "exchange_s": exchange_s(sweep, total, bucket_bytes=bucket)
        }  # fmt: skip
    report["verdict"] = [_verdict(sweep, ranks)]
    return report


def as_lines(report: dict[str, Any]) -> list[str]:
    """The report as a person reads it."""
    head = f"{report['world_size']} ranks over {report['backend']} on {report['device']}; link: {report['link']}"
    lines = [head, f"{'size':>10}  {'latency':>10}  {'algorithm':>12}  {'bus':>12}  of nominal"]
    for each in report["sizes"]:
        nominal = report["nominal_bytes_per_s"]
        share = f"{each['bus_bytes_per_s'] / nominal:.0%}" if nominal else "-"
        lines.append(
            f"{format_bytes(each['size_bytes']):>10}  {each['latency_s'] * 1e3:>7.3f} ms  "
            f"{_speed(each['algorithm_bytes_per_s']):>12}  {_speed(each['bus_bytes_per_s']):>12}  {share:>10}"
        )
    if found := report["gradients"]:
        sizes = f"{format_bytes(found['bytes'])} of gradients in buckets of {format_bytes(found['bucket_bytes'])}"
        lines.append(f"this config: {sizes} take about {found['exchange_s'] * 1e3:.1f} ms of a step without overlap")
    hook = report["fp16_hook"]
    lines.append(
        f"cluster.comm.hook fp16: {format_bytes(hook['size_bytes'])} take {hook['fp16_s'] * 1e3:.1f} ms with it, "
        f"conversion included, and {hook['plain_s'] * 1e3:.1f} ms without"
    )
    return [*lines, *report["verdict"]]


def _verdict(sweep: Sequence[Exchange], ranks: int) -> str:
    best = max(each.bus_bytes_per_s(ranks) for each in sweep)
    return (
        f"verdict: every sum is right; the link carries {_speed(best)}; an exchange below about "
        f"{format_bytes(turning_bytes(sweep))} takes longer to start than to send"
    )


def _speed(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3f} GB/s"


def _scale(args: Namespace, machine: Machine) -> Scale:
    """As a run's; where the number of processes is not given, one per GPU, or two on a CPU."""
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


def _gradients(args: Namespace, machine: Machine, *, scale: Scale) -> tuple[float, float] | None:
    """Bytes of the gradients that a step of the config exchanges, and of its buckets; None where they are not known."""
    if not args.config:
        return None
    cfg = resolve_names(load_config(args.config, args.overrides))
    shape = known_shape(cfg)
    if shape is None:
        return None
    sized = size_run(cfg, machine, world_size=scale.world_size, shape=shape, local_processes=scale.nproc)
    cap_mb = sized.cfg.cluster.comm.bucket_cap_mb
    return standing_bytes(shape, execution_of(sized.cfg)).gradients, cap_mb * 2**20 if cap_mb else BUCKET_BYTES


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def _keep(output: Path, node: int) -> Path | None:
    """Copy a node's output to where it outlives the check; None where it cannot be written there."""
    kept = KEPT / f"comm-check-node{node}.log"
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(output, kept)
    except OSError:
        return None
    return kept


def _failure(notes: dict[int, dict[str, Any]], ending: str, *, told: str, kept: Path | None) -> RunError:
    """Why it came to nothing, by rank: the one that holds a wrong sum before those that only waited.

    `told` is the launcher's last line, `kept` the file of all of them.
    """
    more = f"; what they said is in {kept}" if kept else ""
    wrong = [f"rank {n} {note['error']}" for n, note in notes.items() if "wrong sum" in note.get("error", "")]
    if wrong:
        return RunError(
            "; ".join(wrong) + more,
            where="comm-check",
            fix="try other GPUs or nodes: this exchange cannot be trusted",
        )
    said = {"started": "started and met no one", "met": "met the others and did not finish", "done": "finished"}
    lines = [
        f"rank {n} "
        + (f"failed ({note['error']})" if "error" in note else said.get(note.get("state", ""), "did not come"))
        for n, note in notes.items()
    ]
    what = f"the ranks did not exchange {ending}".replace(" ;", ";") + f": {'; '.join(lines)}"
    return RunError(
        (f"{what} ({told})" if told else what) + more,
        where="comm-check",
        fix="see that every node was started and reaches MASTER_ADDR:MASTER_PORT, and `make doctor` on each",
    )
