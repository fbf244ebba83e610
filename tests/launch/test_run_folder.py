"""A run's folder: whole files, one holder, names that do not collide."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from processes import HANG_S

from sftplay import atomic
from sftplay.atomic import is_locked, write_text
from sftplay.config.layers import RESOLVED
from sftplay.config.load import load_config
from sftplay.errors import ConfigError
from sftplay.heartbeat import Heartbeat, heartbeat_path
from sftplay.launch import run_folder as folders
from sftplay.launch.run_folder import RunFolder, find_run, has_begun, new_folder
from sftplay.runs.resume import _rows_after_shortage
from sftplay.runs.start import archive_earlier_start

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A config whose runs go to tmp_path/outputs, with some keys replaced."""
    monkeypatch.chdir(ROOT)
    cfg = load_config("configs/run_lora.yaml", [f"output_dir={tmp_path / 'outputs'}"])
    return lambda **values: cfg.with_values({"run_name": None, **values}, "test")


def make_run(cfg, name, *, age_s=0.0):
    path = Path(cfg.output_dir) / name
    write_text(path / RESOLVED, "")
    write_text(path / "metrics.jsonl", '{"step": 1}\n')
    os.utime(path / RESOLVED, (1e9 - age_s, 1e9 - age_s))
    return path


STEPS = {
    "a result": lambda folder: (folder.path / "adapter").mkdir(),
    "a checkpoint": lambda folder: (folder.checkpoints / "checkpoint-1").mkdir(parents=True),
    "a line of metrics": lambda folder: folder.metrics.write_text("{}\n"),
    "its status": lambda folder: folder.update_status(step=1),
    "its heartbeat": lambda folder: Heartbeat(heartbeat_path(folder.logs, 0), pid=1).enter("data", step=2),
}


@pytest.mark.parametrize("state", ["done", "stopped"])
def test_a_run_that_is_finished_is_not_advised_to_resume(state, config):
    cfg = config(run_name="mine")
    folder = RunFolder(make_run(cfg, "mine"))
    folder.update_status(state=state, step=1)
    with pytest.raises(ConfigError) as found:
        new_folder(cfg, "x.yaml")
    assert ("resume" in found.value.fix) == (state != "done")
    assert "choose another run_name" in found.value.fix


@pytest.mark.parametrize("sign", STEPS)
def test_a_run_that_has_made_a_step_is_never_replaced(sign, config):
    cfg = config(run_name="mine")
    folder = new_folder(cfg, "x.yaml")
    folder.create()
    folder.resolved.touch()
    assert not folder.has_made_step
    STEPS[sign](folder)
    assert folder.has_made_step
    for start in (lambda: new_folder(cfg, "x.yaml"), lambda: archive_earlier_start(folder)):
        with pytest.raises(ConfigError, match="a run called 'mine' exists"):
            start()
    assert folder.resolved.exists()


def test_the_name_of_a_run_that_runs_is_refused_as_running_and_not_with_a_resume(config):
    folder = new_folder(config(run_name="mine"), "x.yaml")
    make_run(config(), "mine")
    with folder.locked(), pytest.raises(ConfigError, match="a run called 'mine' exists") as refused:
        new_folder(config(run_name="mine"), "x.yaml")
    assert refused.value.fix == "wait for its end: it runs, or choose another run_name"


def test_a_run_without_a_step_gives_its_name_to_the_next_start_and_is_kept_with_its_reason(config, capsys):
    cfg = config(run_name="mine")
    for n in range(3):  # within one second
        folder = new_folder(cfg, "x.yaml")
        archive_earlier_start(folder)
        with folder.locked():
            folder.create()
            folder.resolved.touch()
            (folder.path / "base").mkdir()
            Heartbeat(heartbeat_path(folder.logs, 0), pid=1).enter("forward", step=1)
            folder.update_status(state="failed", step=0, error={"code": "death", "what": f"cause {n}"})
    kept = sorted(folder.path.parent.glob(".set-aside/mine-*"))
    assert [RunFolder(path).read_json("status.json")["error"]["what"] for path in kept] == ["cause 0", "cause 1"]
    assert not any((path / "base").exists() for path in kept)
    assert f"the earlier start of mine made no step (cause 0): kept in {kept[0]}" in capsys.readouterr().out


@pytest.mark.parametrize("names", [["notes.txt"], ["logs", "notes.txt"], ["checkpoints", "metrics.jsonl", "a", "b"]])
def test_a_folder_of_the_users_with_the_name_of_a_run_is_refused_and_stays_where_it_is(names, config):
    folder = new_folder(config(run_name="mine"), "x.yaml")
    for name in names:
        write_text(folder.path / name / "kept.txt", "mine")
    with pytest.raises(ConfigError, match="was never a run of this kit") as refusal:
        archive_earlier_start(folder)
    assert refusal.value.where == str(folder.path)
    assert all((folder.path / name / "kept.txt").read_text() == "mine" for name in names)
    assert [path.name for path in folder.path.parent.iterdir()] == ["mine"]


def test_a_start_that_was_killed_before_it_wrote_anything_and_a_job_that_waits_hinder_nothing(config):
    folder = new_folder(config(run_name="mine"), "x.yaml")
    half = f".{RESOLVED}.30768"  # of a process with this pid that was killed while it wrote
    for name in ("logs/rank0.log", ".lock", ".status.lock", "slurm.yaml", "slurm-17/env.txt", half):
        write_text(folder.path / name, "")
    archive_earlier_start(folder)
    assert (folder.path / "slurm.yaml").exists()


def test_an_exit_code_written_while_the_main_rank_notes_its_step_is_not_lost(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    folder.update_status(state="running", step=1)
    failing = threading.Thread(target=folder.update_status, kwargs={"state": "failed", "exit_code": 3})
    write = folders.write_text

    def write_late(path: Path, text: str) -> None:
        if threading.current_thread() is not failing:
            failing.start()
            failing.join(0.5)  # without a lock it has written by now, and what follows would take it back
        write(path, text)

    monkeypatch.setattr(folders, "write_text", write_late)
    folder.update_status(step=2)
    failing.join(HANG_S)
    assert folder.read_json("status.json") == {"state": "failed", "step": 2, "exit_code": 3}


def test_a_run_starts_while_somebody_asks_whether_it_is_locked(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    asker = (folder.path / ".lock").open("ab")
    fcntl.flock(asker, fcntl.LOCK_SH)
    timer = threading.Timer(0.03, asker.close)
    timer.start()
    with folder.locked():
        assert is_locked(folder.path / ".lock")
    timer.join()


def test_status_is_written_where_the_file_system_has_no_locks_or_a_holder_stands_still(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    monkeypatch.setattr("sftplay.atomic.STILL_S", 0.0)
    with atomic.locked(tmp_path / ".status.lock"):
        folder.update_status(step=1)
    monkeypatch.setattr("sftplay.atomic.fcntl.flock", lambda *_: (_ for _ in ()).throw(OSError(95, "no locks")))
    folder.update_status(exit_code=0)
    assert folder.read_json("status.json") == {"step": 1, "exit_code": 0}


def test_runs_started_at_the_same_moment_get_different_folders(config, monkeypatch):
    monkeypatch.setattr(folders.time, "strftime", lambda form: "20260102-030405")
    first, real, looks = new_folder(config(), "x.yaml"), Path.exists, iter([False])
    monkeypatch.setattr(Path, "exists", lambda path: real(path) and next(looks, True))  # it was made behind the look
    second = new_folder(config(), "x.yaml")
    assert (first.name, second.name) == ("x-20260102-030405", "x-20260102-030405-2")


def test_the_run_of_a_config_is_its_newest(config):
    cfg = config()
    make_run(cfg, "run-20260101-000000", age_s=1)
    newest = make_run(cfg, "run-20260101-000000-2")
    make_run(cfg, "other-20260101-000000", age_s=-5)
    assert find_run(cfg, "configs/run.yaml").path == newest


def test_the_runs_of_another_config_with_a_longer_name_are_not_taken(config):
    cfg = config()
    older = make_run(cfg, "run-20260101-000000", age_s=9)
    make_run(cfg, "run-long-20260102-000000")
    make_run(cfg, "run-20260102-000000.bak")
    assert find_run(cfg, "run.yaml").path == older


def test_a_fixed_name_is_the_run_unless_another_run_is_named(config):
    cfg = config(run_name="fixed")
    fixed, other = make_run(cfg, "fixed"), make_run(cfg, "other")
    assert find_run(cfg, "x.yaml").path == fixed
    assert find_run(cfg, "x.yaml", run="other").path == other
    assert find_run(cfg, "x.yaml", run=str(other)).path == other
    with pytest.raises(ConfigError) as caught:
        find_run(cfg, "x.yaml", run="ohter")
    assert caught.value.fix == "did you mean 'other'?"
    other.with_name("latest").symlink_to("other")
    assert find_run(cfg, "x.yaml", run="latest").path == other


@pytest.mark.parametrize("run", [None, "nowhere"])
def test_a_run_that_does_not_exist_is_refused(config, run):
    for cfg in (config(), config(run_name="fixed")):
        assert not has_begun(cfg, "x.yaml")
        with pytest.raises(ConfigError, match="no run"):
            find_run(cfg, "x.yaml", run=run)


HOLD = """
import sys, time
from pathlib import Path
from sftplay.launch.run_folder import RunFolder
folder = RunFolder(Path(sys.argv[1]))
with folder.locked():
    folder.update_status(pid=4711)
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_second_process_cannot_hold_a_run_until_the_first_has_been_killed(tmp_path):
    argv = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    holder = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"held\n"
        folder = RunFolder(tmp_path / "run")
        with pytest.raises(ConfigError, match=r"'run' is running \(process 4711\)") as caught, folder.locked():
            pass
        assert caught.value.exit_code == 2
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        holder.stdout.close()
    with folder.locked():  # the kernel has released the lock
        assert folder.read_json("status.json")["pid"] == 4711


def test_events_are_lines_with_time_and_attempt_and_a_cut_off_line_is_passed_over(tmp_path):
    folder = RunFolder(tmp_path)
    assert folder.read_events() == []
    folder.update_status(attempts=[{"cause": None}, {"cause": None}])
    folder.add_event("restarted", cause="rank 1 was killed")
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"event": "res\n')
    folder.add_event("resized", batch_size=2)
    first, second = folder.read_events()
    assert (first["attempt"], first["event"], first["cause"]) == (2, "restarted", "rank 1 was killed")
    assert second["batch_size"] == 2
    assert time.strptime(second["time"], "%Y-%m-%dT%H:%M:%S%z")
    assert folder.is_resized


def test_events_of_runs_made_before_there_were_any_are_read_from_their_plan(tmp_path):
    folder = RunFolder(tmp_path)
    shortage = {"step": 3, "batch_size_before": 8, "batch_size": 4}
    folder.write_json("plan.json", {"resized": False, "shortages": [shortage]})
    assert folder.read_events() == [{"event": "out_of_memory", **shortage}]
    assert not folder.is_resized
    folder.write_json("plan.json", {"resized": True, "shortages": [shortage]})
    assert folder.is_resized
    assert _rows_after_shortage(folder) == 4
    folder.add_event("resized", batch_size=4)
    assert _rows_after_shortage(folder) is None
