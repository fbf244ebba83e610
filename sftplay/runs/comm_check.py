"""Measures how the processes of a run would exchange gradients, and says what the figures mean for a run."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from sftplay.atomic import read_object
from sftplay.config.run import RunConfig
from sftplay.errors import RunError
from sftplay.launch.command import Launch, Scale, build_launch
from sftplay.launch.nccl import list_interfaces, nccl_environment
from sftplay.launch.processes import run_with_limit
from sftplay.machine.probe import Machine
from sftplay.model.start_point import resolve_names
from sftplay.places import cache_root
from sftplay.plan.communication import BUCKET_BYTES, SIZES_BYTES, Exchange, exchange_s, turning_bytes
from sftplay.plan.forecast import standing_bytes
from sftplay.plan.memory_setup import read_memory_setup
from sftplay.plan.sizing import size_run
from sftplay.runs.inputs import known_shape
from sftplay.units import format_bytes

LIMIT_S, NODES_LIMIT_S = 180.0, 600.0
"""The longest time for the whole check on one node, where starting on a slow disk takes most of it; and on several
nodes, which are started by hand."""

KEPT = cache_root()
"""Where the output of a failed check is kept. The check's own folder is removed."""


def build_check(
    folder: Path, scale: Scale, *, machine: Machine, cfg: RunConfig | None = None, limit_s: float = LIMIT_S
) -> Launch:
    """Return the command of a run of this scale that starts the check's rank instead of the worker.

    With a config the launch has the variables of its `cluster.nccl`. Raise ConfigErrors where an interface is not
    there, or the environment sets another value.
    """
    has_gpu, module = bool(machine.gpus), "sftplay.train.comm_check"
    launch = build_launch(folder, scale, has_gpu=has_gpu, is_offline=True, module=module, options=[f"{limit_s:g}"])
    if cfg is None:
        return launch
    nccl = nccl_environment(cfg, folder, has_gpu=has_gpu, environ=os.environ, interfaces=list_interfaces())
    return replace(launch, env={**launch.env, **nccl})


def run_check(launch: Launch, folder: Path, *, scale: Scale, limit_s: float) -> dict[str, Any]:
    """Return what the ranks measured. After `limit_s` seconds all of them are ended. Raise RunError where a rank did
    not come or has gone, or a sum is wrong.
    """
    text = folder / "output.txt"
    exit_code = run_with_limit(launch.argv, env=launch.env, output=text, limit_s=limit_s)
    first = scale.node_rank * scale.nproc
    notes = {rank: read_object(folder / f"rank{rank}.json") for rank in range(first, first + scale.nproc)}
    if exit_code == 0 and all(note.get("state") == "done" for note in notes.values()):
        return notes[first]
    lines, pointer = text.read_text(encoding="utf-8", errors="replace").strip().splitlines(), ""
    if lines:
        kept = KEPT / f"comm-check-node{scale.node_rank}.log"
        with suppress(OSError):
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(text, kept)
            pointer = f"; the output is in {kept}"
    # A rank with a wrong sum comes before those that only waited.
    if wrong := [f"rank {n} {note['error']}" for n, note in notes.items() if "wrong sum" in note.get("error", "")]:
        fix = "try other GPUs or nodes: this exchange cannot be trusted"
        raise RunError("; ".join(wrong) + pointer, where="comm-check", fix=fix)
    states = {"started": "started and met no one", "met": "met the others and did not finish", "done": "finished"}
    ranks = "; ".join(
        f"rank {n} "
        + (f"failed ({note['error']})" if "error" in note else states.get(note.get("state", ""), "did not come"))
        for n, note in notes.items()
    )
    ending = f" within {limit_s:g} s" if exit_code is None else f"; the launcher ended with code {exit_code}"
    last_line = f" ({lines[-1]})" if lines and exit_code is not None else ""
    fix = "check that every node was started and reaches MASTER_ADDR:MASTER_PORT; run `make doctor` on each"
    raise RunError(f"the ranks did not exchange{ending}: {ranks}{last_line}{pointer}", where="comm-check", fix=fix)


def describe_exchanges(
    measured: dict[str, Any],
    scale: Scale,
    *,
    nominal_bytes_per_s: float | None,
    link: str,
    gradients: tuple[float, float] | None = None,
) -> dict[str, Any]:
    """Return figures by size, and a verdict. `gradients` are the bytes of all gradients and of a bucket."""
    ranks = scale.world_size
    sweep = [Exchange(size, seconds) for size, seconds in zip(SIZES_BYTES, measured["latencies_s"], strict=True)]
    report: dict[str, Any] = {
        "world_size": ranks,
        "backend": measured["backend"],
        "device": measured["device"],
        "nominal_bytes_per_s": nominal_bytes_per_s,
        "link": link,
        "sizes": [exchange.as_dict(ranks) for exchange in sweep],
        "fp16_hook": {"size_bytes": BUCKET_BYTES, "plain_s": measured["plain_s"], "fp16_s": measured["fp16_s"]},
        "gradients": None,
    }
    if gradients:
        total, bucket = gradients
        report["gradients"] = {
            "bytes": total, "bucket_bytes": bucket, "exchange_s": exchange_s(sweep, total, bucket_bytes=bucket)
        }  # fmt: skip
    best = max(exchange.bus_bytes_per_s(ranks) for exchange in sweep)
    report["verdict"] = [
        f"verdict: every sum is right; the link carries {_format_speed(best)}; an exchange below about "
        f"{format_bytes(turning_bytes(sweep))} takes longer to start than to send"
    ]
    return report


def as_lines(report: dict[str, Any]) -> list[str]:
    """Return the report as a person reads it."""
    head = f"{report['world_size']} ranks over {report['backend']} on {report['device']}; link: {report['link']}"
    lines = [head, f"{'size':>10}  {'latency':>10}  {'algorithm':>12}  {'bus':>12}  of nominal"]
    nominal = report["nominal_bytes_per_s"]
    for row in report["sizes"]:
        share = f"{row['bus_bytes_per_s'] / nominal:.0%}" if nominal else "-"
        algorithm, bus = _format_speed(row["algorithm_bytes_per_s"]), _format_speed(row["bus_bytes_per_s"])
        size, latency = format_bytes(row["size_bytes"]), row["latency_s"] * 1e3
        lines.append(f"{size:>10}  {latency:>7.3f} ms  {algorithm:>12}  {bus:>12}  {share:>10}")
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


def _format_speed(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3f} GB/s"


def gradient_bytes(cfg: RunConfig, machine: Machine, *, scale: Scale) -> tuple[float, float] | None:
    """Return bytes of a step's gradients and of a bucket of them; None where the model's shape is unknown."""
    cfg = resolve_names(cfg)
    shape = known_shape(cfg)
    if shape is None:
        return None
    sized = size_run(cfg, machine, world_size=scale.world_size, shape=shape, local_processes=scale.nproc)
    cap_mb = sized.cfg.cluster.comm.bucket_cap_mb
    return standing_bytes(shape, read_memory_setup(sized.cfg)).gradients, cap_mb * 2**20 if cap_mb else BUCKET_BYTES
