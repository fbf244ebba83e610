"""The run folder in the tests of stalled runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from sftplay.launch.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run in its first attempt, four steps done."""
    run = RunFolder(tmp_path / "run")
    run.create()
    run.update_status(state="running", exit_code=None, step=4, attempts=[{"from_step": 0, "cause": None}])
    return run
