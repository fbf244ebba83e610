"""The GPU benchmark takes the same way on a CPU, and outlives a config that dies."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from processes import HANG_S

from benchmarks import gpu_sizing
from benchmarks.gpu_sizing import CPU_CASES, GPU_CASES, Place, measure_case
from benchmarks.gpu_sizing_table import as_markdown, summarise
from sftplay.errors import RunError
from sftplay.machine.probe import Gpu, Machine
from sftplay.plan.find_shape import find_shape

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


def test_a_config_that_is_cut_off_loses_its_own_row_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    measured = []

    def measure(case: Any, _place: Place) -> dict[str, Any]:
        if measured:
            raise KeyboardInterrupt
        measured.append(case)
        return {"model": case.model, "mode": case.mode, "tokens": case.tokens, "effective": 4, "error": "planted"}

    monkeypatch.setattr(gpu_sizing, "measure_case", measure)
    monkeypatch.setattr(gpu_sizing, "as_line", lambda row: row["model"])
    with pytest.raises(KeyboardInterrupt):
        gpu_sizing.main(["--configs", "2", "--out", str(tmp_path / "out")])
    report = json.loads((tmp_path / "out" / "gpu_sizing.json").read_text())
    assert [row["error"] for row in report["rows"]] == ["planted"]
    assert (tmp_path / "out" / "gpu_sizing.md").read_text()


def place(tmp_path: Path) -> Place:
    machine = Machine((), "none", 16 * GIB, 2, "3.11", "Linux", {})
    return Place(machine, tmp_path, argparse.Namespace(quick=True, limit_s=5.0))


def tiny_folder(_name: str, here: Place) -> Path:
    folder = here.folder_of("tiny")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(gpu_sizing.TINY_CONFIG))
    return folder


def test_both_files_are_whole_after_every_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[list[str]] = []

    def measured(case: gpu_sizing.Case, _: Place) -> dict[str, Any]:
        report = json.loads((tmp_path / "gpu_sizing.json").read_text())
        assert "configs in" in (tmp_path / "gpu_sizing.md").read_text()
        seen.append([row["mode"] for row in report["rows"]])
        return {"model": case.model, "mode": case.mode, "tokens": case.tokens, "error": "it was killed"}

    monkeypatch.setattr(gpu_sizing, "measure_case", measured)
    monkeypatch.setattr(gpu_sizing, "probe", lambda: place(tmp_path).machine)
    assert gpu_sizing.main(["--out", str(tmp_path)]) == 0
    assert seen == [[], ["full"], ["full", "lora"]]
    assert len(json.loads((tmp_path / "gpu_sizing.json").read_text())["rows"]) == 3


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


def test_memory_that_runs_out_at_the_chosen_batch_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    nothing = {"points": [], "accumulates": True, "out_of_memory_rows": 4, "device": None}
    monkeypatch.setattr(gpu_sizing, "ensure_model", tiny_folder)
    monkeypatch.setattr(gpu_sizing, "run_probe", lambda *_, **__: nothing)
    row = measure_case(CPU_CASES[0], place(tmp_path))
    assert (row["out_of_memory"], row["error"]) == (True, None)
    assert summarise([row])["out_of_memory"] == 1


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


def test_the_configs_span_what_the_benchmark_promises():
    sizes = [find_shape(case.model).total_params for case in GPU_CASES]
    assert len(GPU_CASES) >= 12
    assert (min(sizes) < 0.14e9, max(sizes) > 14e9) == (True, True)
    assert {case.mode for case in GPU_CASES} == {"full", "lora", "qlora"}
    assert {case.tokens for case in GPU_CASES} >= {512, 8192}
    # A model's cases lie side by side: its weights are made, and removed, once.
    models = [case.model for case in GPU_CASES]
    assert sum(a != b for a, b in pairwise(models)) == len(set(models)) - 1


def test_a_process_holds_the_most_that_its_allocator_held_and_what_lies_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """By hand: 24 GiB were free. At the end 16 are, and the allocator has 7: 1 GiB lies beside it. It had held 12."""
    card = Gpu(0, "a card", 24 * GIB, 24 * GIB, (8, 0))
    machine = Machine((card,), "none", 16 * GIB, 2, "3.11", "Linux", {})
    point = {"rows": 1, "tokens": 64, "peaks_bytes": {"head": 10 * GIB}, "reserved_bytes": 12 * GIB, "seconds": 1.0}
    device = {"total_bytes": 24 * GIB, "free_bytes": 16 * GIB, "reserved_bytes": 7 * GIB}
    monkeypatch.setattr(gpu_sizing, "run_probe", lambda *_, **__: {"points": [point], "device": device})
    train = SimpleNamespace(batch_size=1, grad_accum=1)
    sized: Any = SimpleNamespace(cfg=SimpleNamespace(train=train))
    held = gpu_sizing.hold(sized, Place(machine, tmp_path, argparse.Namespace(quick=True, limit_s=5.0)))
    assert held["process_bytes"] == 13 * GIB
