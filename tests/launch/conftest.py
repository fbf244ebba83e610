"""The run folder in the tests of stalled runs, and stand-ins for SLURM."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from slurm_life import Life

from sftplay.launch.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run in its first attempt, four steps done."""
    run = RunFolder(tmp_path / "run")
    run.create()
    run.update_status(state="running", exit_code=None, step=4, attempts=[{"from_step": 0, "cause": None}])
    return run


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Puts programs on PATH that stand in for SLURM's: name=shell text. They write each call to the file returned."""
    calls = tmp_path / "calls.txt"
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("env", "dirname", "setsid", "sleep"):  # and no other program: SLURM may be installed here
        (programs / name).symlink_to(str(shutil.which(name)))
    monkeypatch.setenv("PATH", str(programs))

    def put(**texts: str) -> Path:
        for name, text in texts.items():
            (programs / name).write_text(f'#!/bin/sh\necho {name} "$@" >> "{calls}"\n{text}\n')
            (programs / name).chmod(0o755)
        calls.touch()
        return calls

    for name in ("sbatch", "squeue", "scancel", "scontrol"):
        put(**{name: "echo not here >&2; exit 1"})
    return put


@pytest.fixture
def life(tmp_path: Path) -> Life:
    return Life(tmp_path)
