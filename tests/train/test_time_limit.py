"""A run with a time limit stops early enough for its checkpoint and says so. With no time left it does not begin."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from in_process import Inputs, new_run, train_in

from sftplay.errors import ConfigError
from sftplay.train.guards import (
    Deadline,
    StopInTime,
    StopOnSignal,
    find_deadline,
    longest_evaluation_s,
)
from sftplay.train.metrics import Observer

ROOT = Path(__file__).resolve().parents[2]
NOW = 1_000_000.0


@pytest.mark.parametrize(
    ("limit", "job_end", "at_s", "origin"),
    [
        ("2h", None, NOW - 600 + 7200, "train.time_limit 2h"),
        (None, "1003600", NOW + 3600, "SLURM"),
        ("30m", "1003600", NOW - 600 + 1800, "train.time_limit 30m"),
        ("2h", "1003600", NOW + 3600, "SLURM"),
    ],
)
def test_the_earlier_of_the_limit_and_the_end_of_the_job_counts(limit: Any, job_end: Any, at_s: float, origin: str):
    environment = {"SLURM_JOB_END_TIME": job_end} if job_end else {}
    deadline = find_deadline(limit, environment, started_s=NOW - 600, now_s=NOW)
    assert deadline is not None
    assert deadline.at_s == at_s
    assert origin in deadline.origin


def test_without_a_known_end_there_is_no_limit(capsys: Any):
    assert find_deadline(None, {}, started_s=NOW, now_s=NOW) is None
    assert find_deadline(None, {"SLURM_JOB_END_TIME": "Unknown"}, started_s=NOW, now_s=NOW) is None
    assert "'Unknown' is not a number" in capsys.readouterr().out


def test_limit_that_is_over_before_the_first_step_is_an_error():
    with pytest.raises(ConfigError, match=r"train\.time_limit 10s was 5\.0 s ago, before the first step") as caught:
        find_deadline("10s", {}, started_s=NOW - 15, now_s=NOW)
    assert caught.value.fix == "allow more time"


class Measuring(Observer):
    """A callback that measures held-out rows itself, at the start and every `every` steps, as tasks on prompts do."""

    def __init__(self, every: int) -> None:
        self.every = every

    def measures_at(self, step: int, state: Any) -> bool:
        return step % self.every == 0


class Timed:
    """A trainer's events on a clock of our own; with `measures_every` a callback measures held-out rows."""

    def __init__(self, home: Path, time_s: float, *, eval_steps: int | None = None, measures_every: int = 0) -> None:
        self.now, self.stop = NOW, StopOnSignal()
        self.guard = StopInTime(Deadline(NOW + time_s, "train.time_limit"), self.stop, clock=lambda: self.now)
        self.args = SimpleNamespace(output_dir=str(home), eval_strategy="steps" if eval_steps else "no")
        self.state = SimpleNamespace(
            global_step=0, max_steps=10**6, save_steps=10**6, eval_steps=eval_steps or 0, log_history=[]
        )
        self.model, self.optimizer = torch.nn.Linear(99, 1), SimpleNamespace(state={})
        callbacks = [Measuring(measures_every)] if measures_every else []
        self.guard.attach(cast(Any, SimpleNamespace(callback_handler=SimpleNamespace(callbacks=callbacks))))
        self.guard.on_train_begin(self.args, self.state, None)

    def step(self, seconds: float, *, save_s: float | None = None, evaluation_s: float | None = None) -> bool:
        """True when the run ends with this step."""
        self.now += seconds
        self.guard.on_optimizer_step(self.args, self.state, control=None, model=self.model, optimizer=self.optimizer)
        self.state.global_step += 1
        stops = self.stop.received != 0
        if evaluation_s is not None:
            self.now += evaluation_s
            self.guard.on_evaluate(self.args, self.state, None)
        if save_s is not None:
            self.now += save_s
            self.guard.on_save(self.args, self.state, None)
        return stops

    def run_until_it_stops(self, seconds: float) -> float:
        """Steps of `seconds` each; what is left of the time at the end."""
        while not self.step(seconds):
            assert self.now < self.guard.deadline.at_s
        return self.guard.deadline.at_s - self.now

    def leave(self, seconds: float) -> None:
        self.guard.deadline = Deadline(self.now + seconds, "the end")


def test_run_stops_while_twice_the_longest_step_and_save_are_left(tmp_path: Path):
    timed = Timed(tmp_path, 3600.0)
    timed.step(30.0, save_s=50.0)
    timed.step(20.0)
    # Another step needs 2 x (30 + 50) = 160 s. In steps of 20 s the last end of a step with so much left is at 160.
    assert timed.run_until_it_stops(20.0) == 140.0
    assert timed.stop.received == signal.SIGUSR1
    # A minute is kept free for fast steps, and a tenth of short times.
    assert Timed(tmp_path, 3600.0).run_until_it_stops(1.0) == 59.0
    assert Timed(tmp_path, 100.0).run_until_it_stops(1.0) == 9.0


def test_time_for_an_evaluation_and_a_save_that_are_due_is_kept_as_well(tmp_path: Path):
    timed = Timed(tmp_path, 3600.0, eval_steps=5)
    timed.step(10.0, save_s=40.0, evaluation_s=100.0)  # 3450 s are left
    for _ in range(4):
        timed.step(10.0)
    timed.leave(330.0)
    # No evaluation is near: 2 x (10 + 40) = 100 are needed, and 310 are left after step 7.
    assert not timed.step(10.0)
    assert not timed.step(10.0)
    timed.leave(309.0)
    # An evaluation is due after step 10: 2 x (10 + 40 + 100) = 300 are needed after step 9, and 289 are left.
    assert not timed.step(10.0)
    assert timed.step(10.0)


def test_an_evaluation_by_a_callback_is_no_part_of_a_step_and_is_foreseen_after_a_resume(tmp_path: Path):
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "step-4.json").write_text(json.dumps({"seconds": 300.0}))
    (tmp_path / "eval" / "step-8.json").write_text(json.dumps({"seconds": 200.0}))
    assert longest_evaluation_s(tmp_path / "none", [{"loss": 1.0}, {"eval_runtime": 70.0}]) == 70.0
    timed = Timed(tmp_path / "checkpoints", 10_000.0, measures_every=3)
    assert timed.guard.longest_s["evaluation"] == 300.0
    timed.now += 500.0
    timed.guard.on_epoch_begin(timed.args, timed.state, None)  # at the start
    for _ in range(3):
        assert not timed.step(10.0)
    timed.now += 600.0
    timed.guard.on_log(timed.args, timed.state, None)
    timed.step(10.0, save_s=40.0)
    assert timed.guard.longest_s == {"step": 10.0, "evaluation": 600.0, "save": 40.0}
    # After step 5 an evaluation is due behind step 6: 2 x (10 + 40 + 600) = 1300. After step 7 none is: 2 x (10 + 40).
    timed.leave(10.0 + 1290.0)
    assert timed.step(10.0)
    timed.stop.received, timed.state.global_step = 0, 6
    timed.leave(10.0 + 110.0)
    assert not timed.step(10.0)


def test_run_in_a_slurm_job_that_ends_stops_with_a_checkpoint_and_goes_on_later(
    tmp_path: Path, inputs: Inputs, capsys: Any, monkeypatch: Any
):
    cfg, folder = new_run(tmp_path, inputs)
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 100_000))
    monkeypatch.setattr("sftplay.train.guards.LEAST_S", 1e9)
    monkeypatch.setattr("sftplay.train.guards.LEAST_SHARE", 1.0)  # the first step ends too late
    done = train_in(cfg, folder)
    assert (done.outcome.step, done.outcome.stop_signal) == (1, signal.SIGUSR1)
    assert (folder.checkpoints / "checkpoint-1" / "COMPLETE.json").exists()
    assert "stopping as after SIGUSR1" in capsys.readouterr().out
    monkeypatch.delenv("SLURM_JOB_END_TIME")
    done = train_in(cfg.with_values({"train.resume": "auto"}, "test"), folder)
    assert (done.outcome.step, done.outcome.stop_signal) == (4, 0)
    assert [line["step"] for line in done.metrics] == [1, 2, 3, 4]
