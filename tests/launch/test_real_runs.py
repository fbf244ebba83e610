"""Real runs through `python -m sftplay train`: one process, two, stopped, continued, killed."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from processes import HANG_S
from project import open_project

STEPS, ROWS_A_STEP = 20, 8


@pytest.fixture(scope="module")
def project(tmp_path_factory, inputs):
    sizes = {"train__max_steps": STEPS, "train__batch_size": 2, "train__save_steps": 1000}
    with open_project(tmp_path_factory.mktemp("project with space"), inputs, **sizes) as project:
        yield project


@pytest.fixture(scope="module")
def whole(project):
    """A run from start to end: (exit code, output)."""
    return project.run("train", "whole")


def test_a_run_ends_with_0_and_says_so_in_its_status(project, whole):
    code, output = whole
    assert code == 0, output
    status = project.status("whole")
    assert (status["state"], status["exit_code"], status["step"], status["signal"]) == ("done", 0, STEPS, None)
    (attempt,) = status["attempts"]
    assert (attempt["from_step"], attempt["to_step"], attempt["cause"]) == (0, STEPS, "done")
    assert [rank["world_size"] for rank in status["ranks"]] == [1]


def test_metrics_hold_each_step_once_and_no_row_twice_an_epoch(project, whole):
    metrics = project.metrics("whole")
    assert [line["step"] for line in metrics] == list(range(1, STEPS + 1))
    rows = [row for line in metrics for row in line["row_ids"][0]]
    assert len(rows) == STEPS * ROWS_A_STEP
    assert sorted(rows[:70]) == sorted(rows[70:140]) == list(range(70))


def test_a_finished_run_has_nothing_to_resume(project, whole):
    code, output = project.run("resume", "whole", "--json")
    assert code == 0
    assert "is finished: nothing to do" in output
    answer = json.loads(output.splitlines()[-1])
    assert (answer["state"], answer["run"]) == ("done", str(project.folder("whole").path))


@pytest.fixture(scope="module")
def pair(project):
    """The same run on two processes: (exit code, output)."""
    return project.run("train", "pair", "--nproc", "2")


def test_two_processes_are_one_training_on_two_cpus(project, pair):
    code, output = pair
    assert code == 0, output
    ranks = project.status("pair")["ranks"]
    assert [(r["distributed_type"], r["world_size"], r["model_class"]) for r in ranks] == [
        ("MULTI_CPU", 2, "DistributedDataParallel")
    ] * 2
    assert sum(rank["is_main"] for rank in ranks) == 1
    assert len({rank["fingerprint"] for rank in ranks}) == 1
    assert len({rank["pid"] for rank in ranks}) == 2


def test_two_processes_learn_from_the_same_rows_with_the_same_losses_as_one(project, whole, pair):
    alone, together = project.metrics("whole"), project.metrics("pair")
    assert len(alone) == len(together) == STEPS
    for one, two in zip(alone, together, strict=True):
        assert [len(rows) for rows in two["row_ids"]] == [ROWS_A_STEP // 2] * 2
        assert [row for rows in two["row_ids"] for row in rows] == one["row_ids"][0]
        assert two["label_tokens"] == one["label_tokens"]
        assert two["loss"] == pytest.approx(one["loss"], abs=1e-5)


SLOW_DISK_OF_RANK_0 = """
import hashlib, os, time
if os.environ.get("RANK") == "0":
    quick = hashlib.file_digest
    def file_digest(*args):
        time.sleep(1)
        return quick(*args)
    hashlib.file_digest = file_digest
"""


@pytest.mark.slow
def test_ranks_that_have_nothing_to_write_wait_for_the_one_that_has(project, tmp_path, monkeypatch):
    # When a rank ends with an error, torchrun ends all ranks, even one that still writes its checkpoint.
    (tmp_path / "sitecustomize.py").write_text(SLOW_DISK_OF_RANK_0)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    process, _ = project.start_training("slow-disk", "--nproc", "2", "train.max_steps=100000")
    process.send_signal(signal.SIGTERM)
    assert process.wait(HANG_S) == 143, project.output("slow-disk")
    status = project.status("slow-disk")
    assert (status["state"], status["signal"]) == ("stopped", "SIGTERM")
    assert (Path(status["last_checkpoint"]) / "COMPLETE.json").is_file()
