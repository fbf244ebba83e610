"""Writes manifest.json: everything one needs to know to repeat a run, and nothing secret."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from sftplay import __version__
from sftplay.config.schema.run import RunConfig
from sftplay.data.pipeline import Examples
from sftplay.launch.run_folder import RunFolder
from sftplay.machine.probe import probe


def write_manifest(cfg: RunConfig, folder: RunFolder, examples: Examples, facts: dict[str, Any]) -> None:
    """Record versions, machine, code, data, template, seed, sizing and what trains."""
    report = examples.report
    folder.write_json(
        "manifest.json",
        {
            "kit": __version__,
            "git_commit": git_commit(),
            "machine": probe().as_dict(),
            "python": sys.version.split()[0],
            "seed": cfg.seed,
            "origins": cfg.origins,
            "template_sha256": examples.renderer.template_hash,
            "mask_method": examples.renderer.method,
            "data": report["sources"],
            "data_files": report["files"],
            "order_sha256": facts["order"],
            "steps": facts["steps"],
            "model": {key: facts[key] for key in facts if key not in ("order", "steps")},
            "sizing": folder.read_json("plan.json"),
        },
    )


def git_commit() -> str | None:
    """Commit of the kit's own checkout, None outside one."""
    root = Path(__file__).resolve().parents[3]
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
