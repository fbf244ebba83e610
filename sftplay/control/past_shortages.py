"""What running out of memory teaches: the same run goes on with smaller pieces, and later plans begin with them.

A lesson is a small file below .cache; deleting it forgets it.
"""

from __future__ import annotations

import json
import time
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sftplay import log
from sftplay.atomic import write_text
from sftplay.config.load import dump_resolved, load_config
from sftplay.config.rules.resume_keys import values_that_decide_weights
from sftplay.config.schema.run import RunConfig
from sftplay.control.memory_probe import NO_MEMORY_KEYS
from sftplay.data.cache import fingerprint
from sftplay.launch.run_folder import RunFolder
from sftplay.plan.sizing.size_run import RowLimit, SizedRun

LESSONS = Path(".cache") / "out-of-memory"

MORE_ROOM = 1.05
"""A lesson is passed over where this many times the memory is there that was planned with when it was learned."""


def learn(sized: SizedRun, folder: RunFolder) -> None:
    """Remember the largest piece with which the run did not run out of memory, where it did with a larger one."""
    shortages = folder.read_json("plan.json").get("shortages")
    seen = sized.forecast
    if not shortages or seen is None:
        return
    last = shortages[-1]
    lesson = {
        "batch_size": last["batch_size"],
        "exhausted": last["batch_size_before"],
        "run": str(folder.path),
        "on": time.strftime("%Y-%m-%d"),
        "budget_bytes": seen.budget_bytes,
        "planned_bytes": last["planned_bytes"],
        "held_bytes": last["held_bytes"],
    }
    LESSONS.mkdir(parents=True, exist_ok=True)
    write_text(_place(sized), json.dumps(lesson, indent=1) + "\n")


def recall(sized: SizedRun) -> RowLimit | None:
    """The most rows a piece may have by an earlier run of this model, method and device, and why; None without one."""
    seen = sized.forecast
    if seen is None or not _place(sized).is_file():
        return None
    lesson = json.loads(_place(sized).read_text(encoding="utf-8"))
    if seen.budget_bytes > MORE_ROOM * lesson["budget_bytes"]:
        return None
    why = (
        f"{lesson['exhausted']} rows ran out of memory in {lesson['run']} on {lesson['on']} "
        f"(delete {_place(sized)} to try again)"
    )
    return RowLimit(int(lesson["batch_size"]), why)


def smaller_start(folder: RunFolder, args: Namespace) -> int | None:
    """Rows a piece with which a run that has just run out of memory may go on from its last checkpoint.

    None where it ended otherwise or was told not to, and on several nodes, which would have to agree.
    """
    error = folder.read_json("status.json").get("error") or {}
    rows = error.get("batch_size") if error.get("code") == "memory" and args.nnodes == 1 else None
    return int(rows) if rows else None


def shrink(folder: RunFolder, rows: int) -> None:
    """Write smaller sizes into the run folder, from which its next attempt reads them."""
    stored, plan = load_config(folder.resolved), folder.read_json("plan.json")
    sizes = sizes_of(stored, rows, plan["world_size"])
    before = int(stored.train.batch_size)
    note: dict[str, Any] = {"step": None, "batch_size_before": before, "batch_size": rows, "ranks": []}
    note |= {"planned_bytes": plan.get("peak_bytes"), "held_bytes": None}
    write_text(folder.resolved, dump_resolved(stored.with_values({**sizes, "train.resume": "auto"}, "out of memory")))
    changed = {"batch_size": rows, "grad_accum": sizes["train.grad_accum"], "resized": True}
    folder.write_json("plan.json", {**plan, **changed, "shortages": [*plan.get("shortages", []), note]})
    log.say(
        f"out of memory where a step cannot be run again: from the last checkpoint on with {rows} rows at a time in "
        f"place of {before}"
    )


def sizes_of(cfg: RunConfig, rows: int, world_size: int) -> dict[str, Any]:
    """Both sizes of a step for pieces of so many rows."""
    share = cfg.train.effective_batch_size // world_size
    return {"train.batch_size": rows, "train.grad_accum": share // rows}


def _place(sized: SizedRun) -> Path:
    """Of the lesson about all that decides what a piece takes."""
    assert sized.forecast is not None
    setting, values = sized.forecast.setting, values_that_decide_weights(sized.cfg)
    key = fingerprint(
        {
            "model": asdict(setting.shape),
            "config": {key: value for key, value in values.items() if not key.startswith(NO_MEMORY_KEYS)},
            "device": [setting.device.name, setting.device.is_gpu],
            "strategy": [setting.strategy, sized.world_size],
        }
    )
    return LESSONS / f"{key}.json"
