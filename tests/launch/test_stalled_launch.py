"""The end of a stalled launch: all its processes end, and the run's folder has the reason."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from processes import HANG_S

from sftplay.launch import processes
from sftplay.launch import processes as stacks
from sftplay.launch.command import Launch
from sftplay.launch.follow import follow

ROOT = Path(__file__).resolve().parents[2]
RANK = str(Path(__file__).with_name("heartbeat_rank.py"))

CONFIG = "model: {name: 'builtin:tiny'}\ndata: {train_path: rows.jsonl}\ntrain: {stall_timeout: 1}\n"


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A process on a busy machine may take its time to answer, and to end."""
    monkeypatch.setattr(stacks, "ANSWER_S", HANG_S)
    monkeypatch.setattr(processes, "ENDING_S", HANG_S)


LAUNCHER = """
import os, subprocess, sys, time
ranks = [
    subprocess.Popen([sys.executable, *sys.argv[1:]], env={**os.environ, "RANK": str(n)}, start_new_session=True)
    for n in range(2)
]
time.sleep(600)
"""


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc to find the processes")
def test_a_launch_that_stands_still_is_ended_with_all_its_processes_and_noted(folder, capfd):
    folder.resolved.write_text(CONFIG)
    settings = json.dumps({"logs": str(folder.logs)})
    launch = Launch((sys.executable, "-c", LAUNCHER, RANK, settings), {"PYTHONPATH": str(ROOT)})
    assert follow(launch, folder) == 5
    assert [path for path in Path("/proc").glob("[0-9]*/cmdline") if has_argument(path, settings)] == []
    status = folder.read_json("status.json")
    output = capfd.readouterr().out
    assert (status["state"], status["exit_code"], status["error"]["code"]) == ("failed", 5, "run")
    assert status["attempts"] == [{"from_step": 0, "to_step": 4, "cause": status["error"]["what"]}]
    assert re.match(r"ranks? .* been in data for \d+ s at step 5", status["error"]["what"])
    assert f"{folder.path}: {status['error']['what']}\n  fix: look at " in output
    assert " in nobody_feeds_me" in output


def has_argument(path, settings):
    try:
        return settings.encode() in path.read_bytes()
    except OSError:
        return False


def test_a_rank_that_stalls_after_a_recorded_end_does_not_change_it(folder, capfd):
    folder.resolved.write_text(CONFIG)
    folder.update_status(state="failed", exit_code=4)
    settings = json.dumps({"logs": str(folder.logs)})
    assert follow(Launch((sys.executable, RANK, settings), {"PYTHONPATH": str(ROOT)}), folder) == 4
    assert folder.read_json("status.json")["exit_code"] == 4
    assert "rank 0 has been in data" in capfd.readouterr().out
