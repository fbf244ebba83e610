"""Runs of two ranks, forked from one process that has imported everything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from in_process import Inputs, written_config
from processes import HANG_S

from sftplay.atomic import write_text
from sftplay.config.load import load_config
from sftplay.config.resolved import dump_resolved
from sftplay.launch.run_folder import RunFolder
from sftplay.machine.probe import probe
from sftplay.plan.sizing import size_run

ROOT = Path(__file__).resolve().parents[1]

# The parent imports the libraries once. It forks before any work, so no library has started a thread.
START = """
import os
from sftplay.tasks import worker

def start(folder, port, rank):
    child = os.fork()
    if child == 0:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": port}
        code = 1
        try:
            code = worker.main(folder)
        finally:
            os._exit(code)
    return child
"""
"""Text for a script; the child's pid comes back."""


def prepare_two_ranks(home: Path, inputs: Inputs, **changes: Any) -> RunFolder:
    """A run folder as `train` leaves it for two workers."""
    cfg = size_run(load_config(written_config(home, inputs, **changes)), probe(), world_size=2, vocab_size=400).cfg
    folder = RunFolder(home / "outputs" / "run")
    folder.create()
    write_text(folder.resolved, dump_resolved(cfg))
    folder.write_json("plan.json", {"world_size": 2})
    return folder


def run_script(script: str, *words: object, **environment: str) -> str:
    """What a script says that ends well."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", **environment}
    process = subprocess.run(
        [sys.executable, "-c", script, *map(str, words)],
        cwd=ROOT, env=env, timeout=HANG_S, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout
