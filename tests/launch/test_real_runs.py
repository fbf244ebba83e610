"""Real runs through `python -m sftplay train`: one process, two, stopped, continued, killed."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from pathlib import Path

import pytest
from processes import HANG_S, is_alive, wait_until
from project import open_project

ROOT = Path(__file__).resolve().parents[2]
STEPS, ROWS_A_STEP = 40, 8


@pytest.fixture(scope="module")
def project(tmp_path_factory, inputs):
    sizes = {"train__max_steps": STEPS, "train__batch_size": 2, "train__save_steps": 1000}
    with open_project(tmp_path_factory.mktemp("project with space"), inputs, **sizes) as project:
        yield project


def stop(project, name, *overrides):
    """Start a run and send it SIGTERM during its training: (exit code, the ranks' pids)."""
    hold = project.holding(name)
    process = project.start("train", name, *overrides, **hold.after_step(STEPS // 4, project.hook))
    assert hold.wait(process), project.output(name)
    pids = [rank["pid"] for rank in project.status(name)["ranks"]]
    process.send_signal(signal.SIGTERM)
    hold.await_signal(process)
    hold.let_go()
    return process.wait(HANG_S), pids


@pytest.fixture(scope="module")
def whole(project):
    """A run from start to end: (exit code, output)."""
    return project.run("train", "whole")


@pytest.fixture(scope="module")
def stopped(project):
    """The state of a run after SIGTERM during its training."""
    code, pids = stop(project, "stopped")
    return {"code": code, "pids": pids, "status": project.status("stopped"), "output": project.output("stopped")}


@pytest.fixture(scope="module")
def resumed(project, stopped):
    """The same run continued to its end: (exit code, output)."""
    return project.run("resume", "stopped")


def test_a_run_ends_with_0_and_says_so_in_its_status(project, whole):
    code, output = whole
    assert code == 0, output
    status = project.status("whole")
    assert (status["state"], status["exit_code"], status["step"], status["signal"]) == ("done", 0, STEPS, None)
    assert status["attempts"] == [{"from_step": 0, "to_step": STEPS, "cause": "done"}]
    assert [rank["world_size"] for rank in status["ranks"]] == [1]


def test_a_run_keeps_every_promised_file(project, whole):
    path = project.folder("whole").path
    for name in ("config.resolved.yaml", "plan.json", "manifest.json", "launch.txt", "logs/rank0.log", "metrics.jsonl"):
        assert (path / name).is_file(), name
    assert "sftplay.tasks.worker" in (path / "launch.txt").read_text()
    assert (path / "adapter" / "adapter_model.safetensors").is_file()
    assert (path / "checkpoints" / f"checkpoint-{STEPS}" / "COMPLETE.json").is_file()
    assert (path.parent / "latest").is_symlink()


def test_nothing_but_our_own_lines_reaches_the_screen(whole):
    lines = whole[1].splitlines()
    assert [line for line in lines if "Warning" in line or "Traceback" in line] == []
    assert any(line.startswith("[train] Effective batch size: 8") for line in lines)


def test_metrics_hold_each_step_once_and_no_row_twice_an_epoch(project, whole):
    metrics = project.metrics("whole")
    assert [line["step"] for line in metrics] == list(range(1, STEPS + 1))
    rows = [row for line in metrics for row in line["row_ids"][0]]
    assert len(rows) == STEPS * ROWS_A_STEP
    assert sorted(rows[:70]) == sorted(rows[70:140]) == list(range(70))


def test_a_name_that_is_taken_is_refused_and_the_run_untouched(project, whole):
    before = project.folder("whole").metrics.read_bytes()
    code, output = project.run("train", "whole")
    assert code == 2
    assert "command line run_name: a run called 'whole' exists\n  fix: continue it with `make resume`" in output
    assert project.folder("whole").metrics.read_bytes() == before


def test_a_finished_run_has_nothing_to_resume(project, whole):
    code, output = project.run("resume", "whole", "--json")
    assert code == 0
    assert "is finished: nothing to do" in output
    answer = json.loads(output.splitlines()[-1])
    assert (answer["state"], answer["run"]) == ("done", str(project.folder("whole").path))


def test_sigterm_ends_a_run_with_143_and_a_complete_checkpoint(project, stopped):
    assert stopped["code"] == 143, stopped["output"]
    status = stopped["status"]
    assert (status["state"], status["exit_code"], status["signal"]) == ("stopped", 143, "SIGTERM")
    step = status["step"]
    assert 0 < step < STEPS
    assert status["attempts"] == [{"from_step": 0, "to_step": step, "cause": "SIGTERM"}]
    assert status["last_checkpoint"].endswith(f"checkpoint-{step}")
    assert not any(is_alive(pid) for pid in stopped["pids"])


def test_resume_continues_from_that_checkpoint_to_the_end(project, stopped, resumed):
    code, output = resumed
    assert code == 0, output
    step = stopped["status"]["step"]
    assert f"continuing from {stopped['status']['last_checkpoint']}" in output
    assert (Path(stopped["status"]["last_checkpoint"]) / "COMPLETE.json").is_file()
    status = project.status("stopped")
    assert (status["state"], status["exit_code"]) == ("done", 0)
    assert [(a["from_step"], a["to_step"], a["cause"]) for a in status["attempts"]] == [
        (0, step, "SIGTERM"),
        (step, STEPS, "done"),
    ]


def test_a_resumed_run_ends_as_the_uninterrupted_one_each_step_once(project, whole, stopped, resumed):
    step = stopped["status"]["step"]
    ours, reference = project.metrics("stopped"), project.metrics("whole")
    assert [line["step"] for line in ours] == list(range(1, STEPS + 1))
    assert [line["attempt"] for line in ours] == [1] * step + [2] * (STEPS - step)
    for key in ("loss", "row_ids", "learning_rate", "grad_norm"):
        assert [line[key] for line in ours] == [line[key] for line in reference], key


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


@pytest.mark.long
def test_the_draws_of_dropout_go_on_where_a_stopped_run_left_them(project):
    word = "tuning.lora.dropout=0.1"
    assert project.run("train", "dropout", word)[0] == 0
    assert stop(project, "dropout-stopped", word)[0] == 143
    assert project.run("resume", "dropout-stopped", word)[0] == 0
    ours, reference = project.metrics("dropout-stopped"), project.metrics("dropout")
    assert [line["loss"] for line in ours] == [line["loss"] for line in reference]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: only there a child can be tied to its parent")
def test_no_worker_outlives_a_command_that_is_killed(project):
    run = "killed"
    process, pids = project.start_training(run, "train.max_steps=100000")
    process.kill()
    process.wait()
    wait_until(lambda: not any(is_alive(pid) for pid in pids))
    # A killed run can be resumed at once: the kernel has released its lock.
    again, pids = None, []
    with contextlib.suppress(AssertionError):
        again = project.start("resume", run, "train.max_steps=100000")
        wait_until(lambda: len(project.status(run).get("attempts", [])) == 2)
    again.terminate()
    assert again.wait(HANG_S) == 143, project.output(run)


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


@pytest.mark.slow
def test_two_runs_of_two_processes_go_on_side_by_side(project):
    runs = [project.start("train", f"side-{n}", "--nproc", "2", "train.max_steps=4") for n in (1, 2)]
    assert [process.wait(HANG_S) for process in runs] == [0, 0]
    assert all(len(project.status(f"side-{n}")["ranks"]) == 2 for n in (1, 2))
