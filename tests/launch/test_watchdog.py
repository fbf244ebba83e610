"""The watchdog of a launch names the rank without progress and no other. Real processes, a clock set by hand."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes import HANG_S, is_alive, wait_until

from sftplay.heartbeat import Beat, Heartbeat, heartbeat_path, read_heartbeats
from sftplay.launch import processes as stacks
from sftplay.launch.follow import GAP_S, SHOWN_LINES, Stall, Watchdog, find_culprits
from sftplay.launch.processes import COLLECTIVES, NATIVE_COLLECTIVES, Stack, ask_for_stacks, main_stack, read_state

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 60.0

RANK = str(Path(__file__).with_name("heartbeat_rank.py"))


class Clock:
    """A clock that stands still until it is put forward by hand."""

    def __init__(self):
        self.began_s, self.ahead_s = time.monotonic(), 0.0

    def __call__(self):
        return self.began_s + self.ahead_s

    def pass_by(self, seconds, watchdog):
        """Let time pass while the watchdog is called as the parent's loop would."""
        end = self.ahead_s + seconds
        while self.ahead_s < end:
            self.ahead_s = min(self.ahead_s + GAP_S / 2, end)
            watchdog.check()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def watchdog(folder, clock):
    """A watchdog whose launcher is this process."""
    dog = Watchdog(folder, TIMEOUT_S, clock=clock)
    dog.attach(os.getpid())
    return dog


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A rank on a busy machine may take its time for an answer."""
    monkeypatch.setattr(stacks, "ANSWER_S", HANG_S)


@pytest.fixture
def start(folder, watchdog, clock):
    """Starts a rank that stays in the given phase from now on, or `later_s` later; returns it when it is there."""
    started = []

    def start(number, *, by=(), later_s=0.0, **settings):
        settings |= {"logs": str(folder.logs), "now_s": clock() + later_s}
        argv = [*by, sys.executable, RANK, json.dumps(settings)]
        env = {**os.environ, "RANK": str(number), "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(argv, env=env, start_new_session=True)
        started.append(process)
        phase = settings.get("phase", "data")
        wait_until(lambda: any((beat.rank, beat.phase) == (number, phase) for beat in read_heartbeats(folder.logs)))
        clock.ahead_s += 0.01
        return process

    yield start
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def stall_of(watchdog, clock, seconds):
    with pytest.raises(Stall) as caught:
        clock.pass_by(seconds, watchdog)
    return caught.value


def test_the_rank_without_progress_is_named_with_phase_step_and_code_and_those_that_wait_for_it(
    folder, watchdog, clock, start
):
    start(0, phase="communication", place="waits_in_collective")
    start(1)
    clock.pass_by(TIMEOUT_S - 15, watchdog)
    stall = stall_of(watchdog, clock, 20)
    expected = r"rank 1 has been in data for 6\d s at step 5; rank 0 waits for it \(communication\)"
    assert re.fullmatch(expected, stall.what)
    assert (stall.where, stall.exit_code) == (str(folder.path), 5)
    for part in (str(folder.logs / "rank1.stacks"), "train.stall_timeout (60 s)", "`make resume`"):
        assert part in stall.fix
    assert stall.stack[0] == "rank 1, innermost call first:"
    assert stall.stack[1].endswith(" in nobody_feeds_me")
    assert len(stall.stack) <= 1 + SHOWN_LINES
    assert "a_thread_beside" in (folder.logs / "rank1.stacks").read_text()
    assert "distributed_c10d.py" in (folder.logs / "rank0.stacks").read_text()


def test_when_all_ranks_wait_it_is_reported_a_little_later(watchdog, clock, start):
    start(0, phase="communication")
    start(1, phase="communication")
    clock.pass_by(TIMEOUT_S + 2, watchdog)
    stall = stall_of(watchdog, clock, TIMEOUT_S)
    assert re.match(
        r"all ranks here wait for others: ranks 0 and 1 have been in communication for \d+ s at step 5$", stall.what
    )
    assert "network" in stall.fix


def test_a_rank_that_makes_progress_while_the_stacks_are_written_is_no_culprit(folder, watchdog, clock, start):
    start(0, place="goes_on")
    clock.pass_by(TIMEOUT_S + 5, watchdog)
    assert "goes_on" in (folder.logs / "rank0.stacks").read_text()


def test_a_rank_that_has_died_is_left_to_the_launcher(watchdog, clock, start):
    start(0, phase="communication")
    lost = start(1)
    watchdog.check()
    clock.pass_by(5, watchdog)
    lost.kill()
    wait_until(lambda: not is_alive(lost.pid))
    clock.pass_by(TIMEOUT_S + 5, watchdog)


def test_heartbeats_of_another_node_are_ignored(folder, watchdog, clock, start, monkeypatch):
    monkeypatch.setattr("sftplay.heartbeat.time", SimpleNamespace(monotonic=clock))
    other_node, own = start(3), start(0, phase="idle")
    watchdog.attach(own.pid)
    # In containers, processes of two nodes may have the same pid.
    Heartbeat(heartbeat_path(folder.logs, 4), pid=own.pid).enter("save", step=1)
    clock.pass_by(2 * TIMEOUT_S, watchdog)
    assert is_alive(other_node.pid)
    assert (folder.logs / "rank3.stacks").read_text() == ""


def test_a_parent_that_was_away_gives_all_ranks_the_full_time_again(watchdog, clock, start):
    start(0)
    clock.pass_by(TIMEOUT_S - 15, watchdog)
    clock.ahead_s += 1000
    watchdog.check()
    clock.pass_by(TIMEOUT_S - 15, watchdog)
    stall_of(watchdog, clock, 20)


def test_a_rank_without_an_answer_is_named_with_the_reason_whatever_it_answered_before(
    folder, watchdog, clock, start, monkeypatch
):
    process = start(0)
    assert ask_for_stacks(folder.logs, {0: process.pid})[0].lines
    monkeypatch.setattr(stacks, "ANSWER_S", 0.3)
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: read_state(process.pid) == "T")
    stall = stall_of(watchdog, clock, TIMEOUT_S + 5)
    assert stall.stack[1:] == [f"  process {process.pid} gives no stack: it is stopped by a signal"]


# Which rank is behind

OWN = Stack(('  File "rows.py", line 7 in read',))
MEETING = Stack(('  File "/x/torch/distributed/distributed_c10d.py", line 7 in barrier', *OWN.lines))
BELOW = Stack(('  File "/x/torch/autograd/graph.py", line 7 in _engine_run_backward', *OWN.lines))


def culprits_of(*ranks):
    beats = [Beat(rank, 100 + rank, step, phase, 0.0) for rank, (step, phase, _) in enumerate(ranks)]
    return [beat.rank for beat in find_culprits(beats, {rank: each[2] for rank, each in enumerate(ranks)})]


def test_in_the_same_phase_a_rank_that_may_wait_in_native_code_is_blamed_only_if_all_may():
    assert culprits_of((5, "backward", BELOW), (5, "backward", OWN)) == [1]
    assert culprits_of((5, "backward", BELOW), (5, "backward", BELOW)) == [0, 1]
    assert culprits_of((5, "backward", BELOW), (5, "optimizer", MEETING)) == [0]
    assert culprits_of((5, "backward", MEETING), (5, "communication", OWN)) == []


def test_torch_has_the_files_in_which_collectives_start():
    site = Path(importlib.util.find_spec("torch").origin).parents[1]
    assert "def all_gather_object(" in (site / COLLECTIVES).read_text()
    assert all("broadcast_coalesced(" in (site / name).read_text() for name in NATIVE_COLLECTIVES[:2])
    assert "def _engine_run_backward(" in (site / NATIVE_COLLECTIVES[2]).read_text()


def test_the_last_thread_of_an_answer_is_the_main_one_and_after_too_many_threads_none_is():
    # The headings of threads in CPython 3.11 and 3.14.
    text = (
        'Thread 0x01 (most recent call first):\n  File "a.py", line 1 in a\n\n'
        'Current thread 0x02 [python] (most recent call first):\n  File "b.py", line 2 in b\n'
        '  File "c.py", line 3 in c\n'
    )
    assert main_stack(text).lines == ('  File "b.py", line 2 in b', '  File "c.py", line 3 in c')
    assert main_stack(text + "...\n") == Stack()
    assert main_stack("") == Stack()
