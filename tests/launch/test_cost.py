"""What a run costs, next to arithmetic by hand."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from sftplay.config.load import load_config
from sftplay.launch.cost import (
    compute_cost,
    count_gpus,
    format_cost,
    last_write_s,
    new_attempt,
    sum_attempts,
    with_ends,
)
from sftplay.launch.run_folder import RunFolder
from sftplay.report.run_files import RunFiles

ROOT = Path(__file__).resolve().parents[2]


def attempt(seconds: float | None = None, gpus: int = 1, price: float | None = None, **more: Any) -> dict[str, Any]:
    known = {"seconds": seconds, "price_per_hour": price}
    return {"gpus": gpus, **{key: value for key, value in known.items() if value is not None}, **more}


def test_a_cost_is_hours_times_gpus_times_the_price_and_without_a_gpu_that_of_the_machine():
    assert compute_cost(5400.0, gpus=8, price_per_hour=2.5) == pytest.approx(30.0)  # 1.5 h x 8 x 2.5
    assert compute_cost(1800.0, gpus=0, price_per_hour=0.4) == pytest.approx(0.2)
    assert [format_cost(cost) for cost in (0.0, 0.01234, 0.1, 30.0, 1234.5)] == [
        "0.00", "0.0123", "0.10", "30.00", "1,234.50",
    ]  # fmt: skip


def test_attempts_on_other_gpus_and_at_other_prices_add_up():
    eight, four = attempt(3600.0, 8, 2.5), attempt(1800.0, 4, 2.0)
    assert sum_attempts([eight, four]) == (5400.0, pytest.approx(24.0))  # 1 h x 8 x 2.5 + 0.5 h x 4 x 2
    assert sum_attempts([eight, attempt(60.0)]) == (3660.0, None)  # the second has no price
    assert sum_attempts([eight, {"from_step": 0, "cause": "done"}]) == (None, None)  # of an older release
    assert sum_attempts([]) == (None, None)
    assert sum_attempts([{"seconds": "3", "gpus": True, "price_per_hour": -1}]) == (None, None)


def test_an_attempt_that_was_killed_lasts_until_the_last_write_to_its_files(tmp_path: Path):
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.update_status(attempts=[attempt(price=2.0, started=1000.0, cause=None)])
    folder.metrics.touch()
    for path in (folder.metrics, folder.path / "status.json"):
        os.utime(path, (4600.0, 4600.0))
    assert (
        with_ends(folder.read_json("status.json")["attempts"], end_s=last_write_s(folder.path))[0]["seconds"] == 3600.0
    )
    assert RunFiles(folder).spent == (3600.0, pytest.approx(2.0))
    ended = [attempt(7.0, started=1000.0)]
    assert with_ends(ended, end_s=5000.0) == ended


def test_a_new_attempt_counts_from_the_start_of_the_workers_and_keeps_gpus_and_price(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(ROOT)
    cfg = load_config("configs/run_lora.yaml", ["cluster.price_per_hour=2.5"])
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.update_status(started=time.time() - 90.0)
    record = new_attempt(cfg, folder, from_step=3, gpus=8)
    folder.update_status(attempts=[record], step=7)
    folder.close_attempt("done")
    (closed,) = folder.read_json("status.json")["attempts"]
    assert (closed["from_step"], closed["to_step"], closed["gpus"], closed["price_per_hour"]) == (3, 7, 8, 2.5)
    assert 90.0 <= closed["seconds"] < 90.0 + 3600.0
    assert "price_per_hour" not in new_attempt(load_config("configs/run_lora.yaml", []), folder, from_step=0, gpus=0)


def test_gpus_are_one_a_process_with_those_of_a_server_and_of_a_process_that_takes_several(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(ROOT)
    words = ["tuning.mode=lora", "grpo.generation=vllm_server", "grpo.vllm.tensor_parallel=2"]
    cfg = load_config("configs/run_grpo_math.yaml", words)
    assert count_gpus(cfg, world_size=4, has_gpu=True) == 6
    elsewhere = cfg.with_values({"grpo.vllm.url": "http://host:8000"}, "test")
    assert count_gpus(elsewhere, world_size=4, has_gpu=True) == 4
    assert count_gpus(elsewhere, world_size=1, has_gpu=True, devices=["own", "cuda:1", "cpu"]) == 2
    assert count_gpus(cfg, world_size=4, has_gpu=False) == 0


def test_a_run_of_an_older_release_has_the_time_of_its_steps_and_no_cost(tmp_path: Path):
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.update_status(state="done", attempts=[{"from_step": 0, "to_step": 4, "cause": "done"}], train_seconds=12.5)
    assert RunFiles(folder).spent == (12.5, None)
    folder.update_status(attempts=[{"cause": "SIGTERM"}, {"cause": "done"}])
    # Steps 1 and 2 at 3 s, then four steps at 2 s.
    folder.metrics.write_text('{"step": 1, "step_s": 3}\n{"step": 2, "step_s": 3}\n{"step": 6, "step_s": 2.0}\n')
    assert RunFiles(folder).spent == (14.0, None)
