"""Memory: what the plan foretells beside what a run then holds, and the chosen batch's speed beside all others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sftplay.machine.probe import Machine
from sftplay.runs.gpu_check.check import NEEDS_GPU, Broken, Check, Place, a_gpu
from sftplay.runs.gpu_check.kit import run_script
from sftplay.units import format_bytes

CONFIGS = 5

MOST_OFF = 0.15
"""How far a plan may be from what is held, as a share."""

LEAST_SPEED = 0.85
"""Of the fastest batch's tokens a second, what the chosen batch must reach."""


def planned_beside_held(place: Place) -> str:
    """Five configs: allocated and reserved bytes beside the plan's, and a sweep over all batches."""
    words = ("--configs", str(CONFIGS), "--out", str(place.folder), "--limit-s", "150")
    run_script("gpu_sizing.py", *words)
    report = _read(place.folder / "gpu_sizing.json")
    place.details.update(report)
    return judge(report)


def judge(report: dict[str, Any]) -> str:
    """The figure of gpu_sizing.json.

    Raises:
        Broken: a config died or ran out of memory, a plan is too far off, or a chosen batch is too slow.
    """
    found = report["summary"]
    for row in report["rows"]:
        if row["error"]:
            raise Broken(f"{row['model']} {row['mode']}: {row['error']}")
    if found["out_of_memory"]:
        raise Broken(f"{found['out_of_memory']} of {found['configs']} ran out of memory with the chosen batch")
    told = (
        f"plan off by {found['plan_mean_abs']:.1%}, at worst {found['plan_worst']:+.1%}; chosen batch at "
        f"{found['speed_of_best_mean']:.0%} of the fastest's speed, at worst {found['speed_of_best_least']:.0%}"
    )
    if abs(found["plan_worst"]) > MOST_OFF or found["speed_of_best_least"] < LEAST_SPEED:
        raise Broken(f"{told}; {MOST_OFF:.0%} and {LEAST_SPEED:.0%} are the bounds")
    return told


def planned_beside_resident(place: Place) -> str:
    """On a CPU the plan counts the whole process: its resident set stays within what is planned."""
    target = place.folder / "cpu_memory.json"
    run_script("cpu_memory.py", "--only", "full", "--json", str(target))
    (seen,) = _read(target).values()
    plan, peak = seen["plan"], seen["peak_rss_bytes"]
    without_margin = plan["peak_bytes"] - plan["components"]["margin"]
    place.details.update(plan=plan["components"], peak_rss_bytes=peak)
    told = f"{format_bytes(without_margin)} planned, {format_bytes(peak)} resident ({without_margin / peak - 1:+.1%})"
    if peak > plan["peak_bytes"]:
        raise Broken(f"{told}: above the plan with its margin, {format_bytes(plan['peak_bytes'])}")
    return told


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise Broken(f"{path.name} was not written")
    return dict(json.loads(path.read_text(encoding="utf-8")))


def no_gpu(machine: Machine) -> str:
    return "is for machines without a GPU; the row above counts the GPU's memory" if machine.gpus else ""


def a_gpu_to_plan(machine: Machine) -> str:
    return a_gpu(machine) and f"{NEEDS_GPU}; the next row counts the process's memory"


CHECKS = (
    Check(
        name="memory: planned beside held on five configs",
        run=planned_beside_held,
        needs=a_gpu_to_plan,
        limit_s=1800,
        is_long=True,
    ),
    Check(name="memory: planned beside the resident set", run=planned_beside_resident, needs=no_gpu),
)
