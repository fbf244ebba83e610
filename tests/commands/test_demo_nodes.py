"""The demo stays on one node: several would each make a run of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sftplay.cli import main
from sftplay.commands import demo


@pytest.mark.parametrize("more", [[], ["--dry-run"]], ids=["started", "dry"])
def test_several_nodes_are_refused_with_the_command_that_takes_them(
    more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def launch(*_: Any, **__: Any) -> int:
        raise AssertionError("a node has started by itself")

    monkeypatch.setattr(demo, "launch", launch)
    earlier = tmp_path / "demo" / "config.resolved.yaml"
    earlier.parent.mkdir()
    earlier.touch()
    assert main(["demo", "--json", "--nnodes", "2", "--node-rank", "1", f"output_dir={tmp_path}", *more]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["code"], error["where"]) == ("config", "--nnodes")
    assert "make train-distributed CONFIG=configs/run_demo.yaml NNODES=2" in error["fix"]
    assert earlier.exists()  # an earlier demo is not moved aside for nothing
