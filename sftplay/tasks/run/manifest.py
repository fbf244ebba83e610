"""Writes manifest.json: everything one needs to know to repeat a run, and nothing secret."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from sftplay import __version__
from sftplay.machine.probe import probe
from sftplay.places import ROOT
from sftplay.tasks.run.setup import RunSetup
from sftplay.tasks.run.task import Rows


def write_manifest(setup: RunSetup, rows: Rows, *, parameters: dict[str, Any], task: dict[str, Any]) -> None:
    """Record versions, machine, code, data, template, seed, sizing and what trains; `task` adds what only it knows."""
    setup.folder.write_json(
        "manifest.json",
        {
            "kit": __version__,
            "git_commit": git_commit(),
            "machine": probe().as_dict(),
            "python": sys.version.split()[0],
            "seed": setup.cfg.seed,
            "origins": setup.cfg.origins,
            "template_sha256": rows.recipe.get("template_sha256"),
            "mask_method": rows.recipe.get("mask_method"),
            "data": rows.report["sources"],
            "data_files": rows.report["files"],
            "order_sha256": setup.order_hash,
            "steps": setup.steps,
            "model": parameters,
            **task,
            "sizing": setup.folder.read_json("plan.json"),
        },
    )


def git_commit() -> str | None:
    """Commit of the kit's own checkout, None outside one."""
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
