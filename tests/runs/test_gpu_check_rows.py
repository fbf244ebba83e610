"""Rows of `gpu-check` for real, as far as a CPU goes: by make, and those that need a GPU with a stand-in for it."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from out_of_memory import hooked

from benchmarks import gpu_speed
from sftplay.machine.probe import probe
from sftplay.runs.gpu_check import check, checks
from sftplay.runs.gpu_check.check import Broken, CheckContext

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


@pytest.fixture
def place(tmp_path: Path) -> CheckContext:
    machine = replace(probe(), gpus=())
    made = CheckContext(machine, tmp_path / "own", tmp_path / "shared")
    made.folder.mkdir()
    made.shared.mkdir()
    return made


def test_make_runs_a_row_and_writes_the_table(tmp_path: Path, builtin_tiny: Path, forked_python: Path):
    argv = ["make", "-s", "gpu-check", "READY=", f"PY={forked_python}", f"OUT={tmp_path}", "FAST=1", "JSON=1"]
    done = subprocess.run(
        [*argv, 'ARGS=--only "SIGTERM, 8B shape"'], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report == json.loads((tmp_path / "gpu-check.json").read_text())
    stopped, shape = report["rows"]
    assert (stopped["state"], shape["state"]) == ("ok", "not_possible")
    assert stopped["figure"].startswith("state stopped, code 143, with checkpoint-3")
    assert shape["why"] == "needs a CUDA GPU"


def test_memory_that_runs_out_in_a_step_leaves_the_same_weights(
    place: CheckContext, builtin_tiny: Path, monkeypatch: pytest.MonkeyPatch
):
    """The stand-in raises torch's own error where a capped GPU would."""
    monkeypatch.setattr(
        checks, "LARGE", {"train.effective_batch_size": 32, "train.batch_size": 32, "train.max_steps": 3}
    )
    planted = hooked(place.folder, [(0, 2, 1, "backward")])["env"]
    monkeypatch.setattr(checks, "environment", lambda *_, **__: planted)
    assert checks.out_of_memory(place).startswith("32 rows at a time, then 16; weights within")
    (event,) = place.details["events"]
    assert event["step"] == 2


def test_the_cap_is_planted_in_the_worker_and_nowhere_else(place: CheckContext, builtin_tiny: Path):
    """Without a GPU the cap itself fails there: the run ends with that error, at the step that was asked for."""
    run = check.write_run(place.folder, "capped", values={**checks.SAVED, "train.save_steps": 1})
    with pytest.raises(Broken):
        check.call("train", run, env=checks.environment(place.folder, "cap", step=2))
    assert run.status["step"] == 1
    assert "cap_memory" in (run.folder.logs / "rank0.log").read_text()


@pytest.mark.parametrize("case", ["tiny-lora", "tiny-qlora"])
def test_the_kit_and_plain_trl_train_on_the_same(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def measured(who: str) -> dict[str, Any]:
        (tmp_path / who).mkdir()
        return gpu_speed.measure(gpu_speed.CASES[case], who, tmp_path / who)

    ours, trl = measured("ours"), measured("trl")
    assert ours["losses"] == pytest.approx(trl["losses"], rel=1e-5)
    assert len(ours["step_seconds"]) == gpu_speed.WARM + gpu_speed.MEASURED
    assert min(ours["tokens_per_s"], trl["tokens_per_s"]) > 0
    assert ours["mfu"] is None


def test_a_model_with_grouped_heads_has_the_losses_of_eager_attention(
    place: CheckContext, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(checks, "PLAIN", {**checks.PLAIN, "train.effective_batch_size": 4, "train.max_steps": 3})
    assert "the first loss within" in checks.grouped_heads(place, precision="fp32")


def test_a_split_model_takes_steps(place: CheckContext, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "benchmarks" / "cpu_fsdp"))  # accelerate has FSDP for GPUs only
    monkeypatch.setattr(checks, "choose_split_model", lambda *_: "tiny")
    monkeypatch.setattr(checks, "count_processes", lambda _: 2)
    assert checks.larger_than_one(place).startswith("tiny on 2 GPUs; losses ")
