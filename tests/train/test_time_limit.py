"""A run with a time limit stops early enough for its checkpoint and says so. With no time left it does not begin."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
import torch
from in_process import Inputs, new_run, train_in
from processes import HANG_S, wait_until

from sftplay.errors import ConfigError
from sftplay.train.guards import (
    Deadline,
    StopInTime,
    StopOnSignal,
    find_deadline,
    longest_evaluation_s,
    process_start_s,
)
from sftplay.train.observer import Observer

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
    with pytest.raises(ConfigError, match=r"16 min 40 s ago") as caught:
        find_deadline(None, {"SLURM_JOB_END_TIME": "999000"}, started_s=NOW, now_s=NOW)
    assert "unset SLURM_JOB_END_TIME" in caught.value.fix


def test_start_of_the_process_is_that_of_psutil():
    assert process_start_s() == pytest.approx(psutil.Process().create_time(), abs=1.5)  # psutil rounds the boot time


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


class Timed:
    """A trainer's events on a clock of our own. Its checkpoints hold two tensors of 400 bytes."""

    def __init__(self, home: Path, time_s: float, *, max_steps: int = 10**6, eval_steps: int | None = None) -> None:
        self.clock, self.stop = Clock(), StopOnSignal()
        self.guard = StopInTime(Deadline(NOW + time_s, "train.time_limit"), self.stop, clock=self.clock)
        self.args = SimpleNamespace(output_dir=str(home), eval_strategy="steps" if eval_steps else "no")
        self.state = SimpleNamespace(
            global_step=0, max_steps=max_steps, save_steps=10**6, eval_steps=eval_steps or 0, log_history=[]
        )
        self.model = torch.nn.Linear(99, 1)
        self.optimizer = SimpleNamespace(state={})
        self.guard.on_train_begin(self.args, self.state, None)

    def step(self, seconds: float, *, save_s: float | None = None, evaluation_s: float | None = None) -> bool:
        """True when the run ends with this step."""
        self.clock.now += seconds
        self.guard.on_optimizer_step(self.args, self.state, control=None, model=self.model, optimizer=self.optimizer)
        self.state.global_step += 1
        stops = self.stop.received != 0
        if evaluation_s is not None:
            self.clock.now += evaluation_s
            self.guard.on_evaluate(self.args, self.state, None)
        if save_s is not None:
            self.clock.now += save_s
            self.guard.on_save(self.args, self.state, None)
        return stops

    def run_until_it_stops(self, seconds: float) -> float:
        """Steps of `seconds` each; what is left of the time at the end."""
        while not self.step(seconds):
            assert self.clock.now < self.guard.deadline.at_s
        return self.guard.deadline.at_s - self.clock.now


def test_run_stops_while_twice_the_longest_step_and_save_are_left(tmp_path: Path):
    timed = Timed(tmp_path, 3600.0)
    timed.step(30.0, save_s=50.0)
    timed.step(20.0)
    # Another step needs 2 x (30 + 50) = 160 s. In steps of 20 s the last end of a step with so much left is at 160.
    assert timed.run_until_it_stops(20.0) == 140.0
    assert timed.stop.received == signal.SIGUSR1


def test_a_minute_is_kept_free_for_fast_steps_and_a_tenth_of_short_times(tmp_path: Path):
    assert Timed(tmp_path, 3600.0).run_until_it_stops(1.0) == 59.0
    assert Timed(tmp_path, 100.0).run_until_it_stops(1.0) == 9.0


def test_time_of_the_first_checkpoint_is_estimated_from_its_bytes(tmp_path: Path):
    timed = Timed(tmp_path, 3600.0)
    # 20 GB at 100 MB/s are 200 s; with a step of 5 s, doubled: 410 s.
    timed.optimizer.state = {0: {"moment": SimpleNamespace(nbytes=20 * 10**9 - 400)}}
    assert timed.run_until_it_stops(5.0) == 405.0


def test_time_for_an_evaluation_and_a_save_that_are_due_is_kept_as_well(tmp_path: Path):
    timed = Timed(tmp_path, 3600.0, eval_steps=5)
    timed.step(10.0, save_s=40.0, evaluation_s=100.0)  # 3450 s are left
    for _ in range(4):
        timed.step(10.0)
    timed.guard.deadline = Deadline(timed.clock.now + 330.0, "the end")
    # No evaluation is near: 2 x (10 + 40) = 100 are needed, and 310 are left after step 7.
    assert not timed.step(10.0)
    assert not timed.step(10.0)
    timed.guard.deadline = Deadline(timed.clock.now + 309.0, "the end")
    # An evaluation is due after step 10: 2 x (10 + 40 + 100) = 300 are needed after step 9, and 289 are left.
    assert not timed.step(10.0)
    assert timed.step(10.0)


class Measuring(Observer):
    """A callback that measures held-out rows itself, at the start and every `every` steps, as tasks on prompts do."""

    def __init__(self, every: int) -> None:
        self.every = every

    def measures_at(self, step: int, state: Any) -> bool:
        return step % self.every == 0


class OwnEvaluations(Timed):
    """A run whose held-out rows are measured by a callback: the Trainer itself evaluates nothing."""

    def __init__(self, home: Path, time_s: float, *, every: int) -> None:
        super().__init__(home, time_s)
        self.guard.attach(cast(Any, SimpleNamespace(callback_handler=SimpleNamespace(callbacks=[Measuring(every)]))))

    def measure(self, seconds: float) -> None:
        self.clock.now += seconds
        if self.state.global_step:
            self.guard.on_log(self.args, self.state, None)
        else:
            self.guard.on_epoch_begin(self.args, self.state, None)


def test_an_evaluation_by_a_callback_is_no_part_of_a_step(tmp_path: Path):
    timed = OwnEvaluations(tmp_path, 10_000.0, every=3)
    timed.measure(500.0)  # at the start
    for _ in range(3):
        assert not timed.step(10.0)
    timed.measure(600.0)
    timed.step(10.0, save_s=40.0)
    assert timed.guard.longest_s == {"step": 10.0, "evaluation": 600.0, "save": 40.0}
    # After step 5 an evaluation is due behind step 6: 2 x (10 + 40 + 600) = 1300. After step 7 none is: 2 x (10 + 40).
    timed.guard.deadline = Deadline(timed.clock.now + 10.0 + 1290.0, "the end")
    assert timed.step(10.0)
    timed.stop.received, timed.state.global_step = 0, 6
    timed.guard.deadline = Deadline(timed.clock.now + 10.0 + 110.0, "the end")
    assert not timed.step(10.0)


def test_the_first_evaluation_after_a_resume_is_foreseen(tmp_path: Path):
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "step-4.json").write_text(json.dumps({"seconds": 300.0}))
    (tmp_path / "eval" / "step-8.json").write_text(json.dumps({"seconds": 200.0}))
    assert longest_evaluation_s(tmp_path / "eval", []) == 300.0
    assert longest_evaluation_s(tmp_path / "none", [{"loss": 1.0}, {"eval_runtime": 70.0}]) == 70.0
    timed = OwnEvaluations(tmp_path / "checkpoints", 10_000.0, every=4)
    assert timed.guard.longest_s["evaluation"] == 300.0


def test_time_for_a_checkpoint_due_after_this_step_is_kept_beside_the_next_one(tmp_path: Path):
    for save_steps, stops in ((100, False), (2, True)):
        timed = Timed(tmp_path, 3600.0)
        timed.step(10.0, save_s=40.0)
        timed.state.save_steps = save_steps
        timed.guard.deadline = Deadline(timed.clock.now + 10.0 + 150.0, "the end")
        # 2 x (10 + 40) = 100 without the one that is due, 2 x (10 + 2 x 40) = 180 with it.
        assert timed.step(10.0) is stops


def test_the_last_step_a_signal_and_other_ranks_are_left_alone(tmp_path: Path, monkeypatch: Any):
    last = Timed(tmp_path, 100.0, max_steps=1)
    assert not last.step(500.0)
    signalled = Timed(tmp_path, 100.0)
    signalled.stop.received = int(signal.SIGTERM)
    signalled.step(99.0)
    assert signalled.stop.received == signal.SIGTERM
    monkeypatch.setenv("RANK", "1")
    assert not Timed(tmp_path, 100.0).step(99.0)


def test_run_in_a_slurm_job_that_ends_stops_with_a_checkpoint_and_goes_on_later(
    tmp_path: Path, inputs: Inputs, capsys: Any, monkeypatch: Any
):
    cfg, folder = new_run(tmp_path, inputs)
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 100_000))
    for name, value in (("LEAST_S", 1e9), ("LEAST_SHARE", 1.0)):  # the first step ends too late
        monkeypatch.setattr(f"sftplay.train.guards.{name}", value)
    done = train_in(cfg, folder)
    assert (done.outcome.step, done.outcome.stop_signal) == (1, signal.SIGUSR1)
    assert (folder.checkpoints / "checkpoint-1" / "COMPLETE.json").exists()
    assert "stopping as after SIGUSR1" in capsys.readouterr().out
    monkeypatch.delenv("SLURM_JOB_END_TIME")
    done = train_in(cfg.with_values({"train.resume": "auto"}, "test"), folder)
    assert (done.outcome.step, done.outcome.stop_signal) == (4, 0)
    assert [line["step"] for line in done.metrics] == [1, 2, 3, 4]


def status_step(folder: Path) -> int:
    step: int = json.loads((folder / "status.json").read_text())["step"]
    return step


@pytest.mark.slow
def test_command_with_a_time_limit_returns_138_and_its_resume_goes_on(
    write_config: Callable[..., Path], sftplay: Any, tmp_path: Path
):
    # Steps enough for hours. The limit leaves a busy machine time to start up.
    config = write_config(train__max_steps=300_000, train__save_steps=10**6, train__time_limit="30s", logging__steps=50)
    done = sftplay("train", "--config", config)
    assert done.returncode == 138, done.stdout + done.stderr
    assert "train.time_limit 30s is" in done.stdout
    folder = tmp_path / "outputs" / "run"
    status = json.loads((folder / "status.json").read_text())
    assert (status["state"], status["exit_code"], status["signal"]) == ("stopped", 138, "SIGUSR1")
    first = status["step"]
    assert [path.parent.name for path in folder.glob("checkpoints/*/COMPLETE.json")] == [f"checkpoint-{first}"]
    argv = [sys.executable, "-m", "sftplay", "resume", "--config", str(config)]
    with (tmp_path / "output.txt").open("w") as out:
        again = subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    wait_until(lambda: status_step(folder) > first or again.poll() is not None)
    again.terminate()
    assert again.wait(HANG_S) == 143, (tmp_path / "output.txt").read_text()
    assert status_step(folder) > first
