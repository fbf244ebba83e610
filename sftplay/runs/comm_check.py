"""Measures how the processes of a run would exchange gradients, and says what the figures mean for a run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sftplay.config.run import RunConfig
from sftplay.errors import RunError
from sftplay.launch.command.command import WORKER, Launch, Scale, build_launch
from sftplay.launch.command.network import list_interfaces, nccl_environment
from sftplay.launch.supervise.processes import end_launch
from sftplay.machine.probe import Machine
from sftplay.model.start_point import resolve_names
from sftplay.places import cache_root
from sftplay.plan.memory.memory_setup import read_memory_setup
from sftplay.plan.memory.step import standing_bytes
from sftplay.plan.sizing.communication import (
    BUCKET_BYTES,
    SIZES_BYTES,
    Exchange,
    exchange_s,
    turning_bytes,
)
from sftplay.plan.sizing.size_run import size_run
from sftplay.runs.model_shape import known_shape
from sftplay.signals import popen_tied
from sftplay.units import format_bytes

RANK = "sftplay.train.comm_check"

LIMIT_S = 180.0
"""The longest time for the whole check on one node; starting on a slow disk takes most of it."""

NODES_LIMIT_S = 600.0
"""The same for several nodes, which are started by hand."""

KEPT = cache_root()
"""Where the output of a failed check is kept. The check's own folder is removed."""


def build_check(
    folder: Path, scale: Scale, *, machine: Machine, cfg: RunConfig | None = None, limit_s: float = LIMIT_S
) -> Launch:
    """The command of a run of this scale, with the check's rank in the worker's place.

    With a config the launch has the variables of its `cluster.nccl`.

    Raises:
        ConfigErrors: an interface is not there, or the environment sets another value.
    """
    has_gpu = bool(machine.gpus)
    launch = build_launch(folder, scale, has_gpu=has_gpu, is_offline=True)
    argv = tuple(RANK if argument == WORKER else argument for argument in launch.argv)
    nccl = (
        nccl_environment(cfg, folder, has_gpu=has_gpu, environ=os.environ, interfaces=list_interfaces()) if cfg else {}
    )
    return replace(launch, argv=(*argv, f"{limit_s:g}"), env={**launch.env, **nccl})


def run_check(launch: Launch, folder: Path, *, scale: Scale, limit_s: float) -> dict[str, Any]:
    """What the ranks measured. After `limit_s` seconds all of them are ended.

    Raises:
        RunError: a rank did not come or has gone, or a sum is wrong.
    """
    with (folder / "output.txt").open("wb") as output:
        process = popen_tied(launch.argv, output=output, env=launch.env)
        try:
            exit_code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            exit_code = None
        finally:
            if process.poll() is None:
                end_launch(process.pid)
                process.wait()
    first = scale.node_rank * scale.nproc
    notes = {rank: _read(folder / f"rank{rank}.json") for rank in range(first, first + scale.nproc)}
    if exit_code == 0 and all(note.get("state") == "done" for note in notes.values()):
        return notes[first]
    lines = (folder / "output.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    ending = f" within {limit_s:g} s" if exit_code is None else f"; the launcher ended with code {exit_code}"
    kept = _keep(folder / "output.txt", scale.node_rank) if lines else None
    raise _failure(notes, ending, last_line=lines[-1] if lines and exit_code is not None else "", kept=kept)


def describe_exchanges(
    measured: dict[str, Any],
    scale: Scale,
    *,
    nominal_bytes_per_s: float | None,
    link: str,
    gradients: tuple[float, float] | None = None,
) -> dict[str, Any]:
    """The report: figures by size, and a verdict. `gradients` are the bytes of all gradients and of a bucket."""
    ranks = scale.world_size
    sweep = [Exchange(size, seconds) for size, seconds in zip(SIZES_BYTES, measured["latencies_s"], strict=True)]
    report: dict[str, Any] = {
        "world_size": ranks,
        "backend": measured["backend"],
        "device": measured["device"],
        "nominal_bytes_per_s": nominal_bytes_per_s,
        "link": link,
        "sizes": [each.as_dict(ranks) for each in sweep],
        "fp16_hook": {"size_bytes": BUCKET_BYTES, "plain_s": measured["plain_s"], "fp16_s": measured["fp16_s"]},
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
    if exchange := report["gradients"]:
        total, bucket = format_bytes(exchange["bytes"]), format_bytes(exchange["bucket_bytes"])
        lines.append(
            f"this config: {total} of gradients in buckets of {bucket} take about "
            f"{exchange['exchange_s'] * 1e3:.1f} ms of a step without overlap"
        )
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


def gradient_bytes(cfg: RunConfig, machine: Machine, *, scale: Scale) -> tuple[float, float] | None:
    """Bytes of the gradients that a step of the config exchanges, and of a bucket; None where the shape is unknown."""
    cfg = resolve_names(cfg)
    shape = known_shape(cfg)
    if shape is None:
        return None
    sized = size_run(cfg, machine, world_size=scale.world_size, shape=shape, local_processes=scale.nproc)
    cap_mb = sized.cfg.cluster.comm.bucket_cap_mb
    return standing_bytes(shape, read_memory_setup(sized.cfg)).gradients, cap_mb * 2**20 if cap_mb else BUCKET_BYTES


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def _keep(output: Path, node: int) -> Path | None:
    """Copy a node's output out of the check's folder, which is removed; None where the copy cannot be written."""
    kept = KEPT / f"comm-check-node{node}.log"
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(output, kept)
    except OSError:
        return None
    return kept


def _failure(notes: dict[int, dict[str, Any]], ending: str, *, last_line: str, kept: Path | None) -> RunError:
    """Why the check failed, by rank. A rank with a wrong sum comes before those that only waited.

    `last_line` is the launcher's, `kept` the file with all its output.
    """
    pointer = f"; the output is in {kept}" if kept else ""
    wrong = [f"rank {n} {note['error']}" for n, note in notes.items() if "wrong sum" in note.get("error", "")]
    if wrong:
        return RunError(
            "; ".join(wrong) + pointer,
            where="comm-check",
            fix="try other GPUs or nodes: this exchange cannot be trusted",
        )
    states = {"started": "started and met no one", "met": "met the others and did not finish", "done": "finished"}
    ranks = "; ".join(
        f"rank {n} "
        + (f"failed ({note['error']})" if "error" in note else states.get(note.get("state", ""), "did not come"))
        for n, note in notes.items()
    )
    return RunError(
        f"the ranks did not exchange{ending}: {ranks}{f' ({last_line})' if last_line else ''}{pointer}",
        where="comm-check",
        fix="check that every node was started and reaches MASTER_ADDR:MASTER_PORT; run `make doctor` on each",
    )
