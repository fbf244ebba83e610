"""Memory: a plan against what a run then holds, and the chosen batch's speed against all others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sftplay.runs.gpu_check.check import NEEDS_GPU, Broken, Check, CheckContext, a_gpu, run_script
from sftplay.units import format_bytes

MOST_OFF = 0.15
"""How far a plan may be from what is held, as a share."""

LEAST_SPEED = 0.85
"""Of the fastest batch's tokens a second, what the chosen batch must reach."""


def compare_plan(context: CheckContext) -> str:
    """Five configs: allocated and reserved bytes against the plan's, and a sweep over all batches."""
    run_script("gpu_sizing.py", "--configs", "5", "--out", str(context.folder), "--limit-s", "150")
    report = _read(context.folder / "gpu_sizing.json")
    context.details.update(report)
    return judge(report)


def judge(report: dict[str, Any]) -> str:
    """Return the figure of gpu_sizing.json. Raise Broken where a config died or ran out of memory, a plan is too far
    off, or a chosen batch is too slow.
    """
    found = report["summary"]
    for row in report["rows"]:
        if row["error"]:
            raise Broken(f"{row['model']} {row['mode']}: {row['error']}")
    if found["out_of_memory"]:
        raise Broken(f"{found['out_of_memory']} of {found['configs']} ran out of memory with the chosen batch")
    figure = (
        f"plan off by {found['plan_mean_abs']:.1%}, at worst {found['plan_worst']:+.1%}; chosen batch at "
        f"{found['speed_of_best_mean']:.0%} of the fastest's speed, at worst {found['speed_of_best_least']:.0%}"
    )
    if abs(found["plan_worst"]) > MOST_OFF or found["speed_of_best_least"] < LEAST_SPEED:
        raise Broken(f"{figure}; {MOST_OFF:.0%} and {LEAST_SPEED:.0%} are the bounds")
    return figure


def compare_plan_on_cpu(context: CheckContext) -> str:
    """On a CPU the plan counts the whole process: its resident set stays within what is planned."""
    target = context.folder / "cpu_memory.json"
    run_script("cpu_memory.py", "--only", "full", "--json", str(target))
    (seen,) = _read(target).values()
    plan, peak = seen["plan"], seen["peak_rss_bytes"]
    without_margin = plan["peak_bytes"] - plan["components"]["margin"]
    context.details.update(plan=plan["components"], peak_rss_bytes=peak)
    figure = f"{format_bytes(without_margin)} planned, {format_bytes(peak)} resident ({without_margin / peak - 1:+.1%})"
    if peak > plan["peak_bytes"]:
        raise Broken(f"{figure}: above the plan with its margin, {format_bytes(plan['peak_bytes'])}")
    return figure


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise Broken(f"{path.name} was not written")
    return dict(json.loads(path.read_text(encoding="utf-8")))


CHECKS = (
    Check(
        name="memory: planned against held on five configs",
        run=compare_plan,
        needs=lambda machine: a_gpu(machine) and f"{NEEDS_GPU}; the next row counts the process's memory",
        limit_s=1800,
        is_long=True,
    ),
    Check(
        name="memory: planned against the resident set",
        run=compare_plan_on_cpu,
        needs=lambda machine: (
            "is for machines without a GPU; the row above counts the GPU's memory" if machine.gpus else ""
        ),
    ),
)
