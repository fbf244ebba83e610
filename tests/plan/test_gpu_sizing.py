"""The GPU benchmark takes the same way on a CPU, and outlives a config that dies."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import HANG_S

from benchmarks import gpu_sizing
from benchmarks.gpu_sizing import CPU_CASES, Place, measure_case
from benchmarks.gpu_sizing_table import as_markdown, summarise
from sftplay.errors import RunError
from sftplay.machine.probe import Machine

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30


@pytest.mark.slow
def test_benchmark_runs_from_end_to_end_and_the_plan_meets_the_live_tensors(tmp_path: Path):
    argv = [sys.executable, "benchmarks/gpu_sizing.py", "--quick", "--configs", "1", "--out", str(tmp_path)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "gpu_sizing.json").read_text())
    (row,) = report["rows"]
    assert row["error"] is None
    assert row["rows"] * row["accum"] == row["effective"]
    if report["machine"]["device"].startswith("no GPU"):
        assert "live tensors" in report["machine"]["allocated_is"]
        assert row["predicted_allocated_bytes"] == pytest.approx(row["allocated_bytes"], rel=0.03)
    assert set(row["tokens_per_s"]) == {"4", "8"}
    assert 0 < row["speed_of_best"] <= 1
    assert "tiny full 64 | 8 x 1" in (tmp_path / "gpu_sizing.md").read_text()


def place(tmp_path: Path) -> Place:
    machine = Machine((), "none", 16 * GIB, 2, "3.11", "Linux", {})
    return Place(machine, tmp_path, argparse.Namespace(quick=True, limit_s=5.0))


def tiny_folder(_name: str, here: Place) -> Path:
    folder = here.folder_of("tiny")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(gpu_sizing.TINY_CONFIG))
    return folder


def test_a_config_that_dies_or_takes_too_long_is_a_row_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def killed(*_: Any, **__: Any) -> dict[str, Any]:
        raise RunError("it ended with code -9", fix="x")

    monkeypatch.setattr(gpu_sizing, "ensure_model", tiny_folder)
    monkeypatch.setattr(gpu_sizing, "run_probe", killed)
    dead = measure_case(CPU_CASES[0], place(tmp_path / "a"))

    def hangs(*_: Any, **__: Any) -> Path:
        raise subprocess.TimeoutExpired("make", 5)

    monkeypatch.setattr(gpu_sizing, "ensure_model", hangs)
    slow = measure_case(CPU_CASES[1], place(tmp_path / "b"))
    assert (dead["rows"], "code -9" in dead["error"], "timed out" in slow["error"]) == (8, True, True)
    found = summarise([dead, slow])
    assert (found["configs"], found["died"], found["plan_mean_abs"]) == (2, 2, None)
    about = {"device": "x", "date": "y", "driver": "", "libraries": {}, "allocated_is": "z"}
    table = as_markdown({"machine": about, "seconds": 1, "summary": found}, [dead, slow]).splitlines()
    widths = {line.count("|") for line in table if line.startswith("|")}
    assert widths == {13}
    assert "code -9" in table[-2]


def test_figures_of_the_table_by_hand():
    row = {
        "error": None, "out_of_memory": False, "allocated_bytes": 10 * GIB, "estimated_allocated_bytes": 11 * GIB,
        "predicted_allocated_bytes": 9.8 * GIB, "process_bytes": 12 * GIB, "total_bytes": 24 * GIB,
        "speed_of_best": 0.96,
    }  # fmt: skip
    other = {**row, "predicted_allocated_bytes": 10.4 * GIB, "speed_of_best": 1.0}
    found = summarise([row, other])
    assert found["estimate_mean_abs"] == pytest.approx(0.10)
    assert found["plan_mean_abs"] == pytest.approx(0.03)
    assert found["plan_worst"] == pytest.approx(0.04)
    assert found["used_share_mean"] == pytest.approx(0.5)
    assert (found["speed_of_best_mean"], found["speed_of_best_least"]) == (pytest.approx(0.98), 0.96)
