"""Calls of rewards: whatever foreign code does, the call ends, and what is not known is None with a reason."""

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from processes import HANG_S, is_alive, wait_until

from sftplay.errors import ConfigError
from sftplay.reward.reward_set import RewardWorker
from sftplay.signals import STOP_SIGNALS

USER = """
import math, os, time

def honest(completions, answer, **_):
    return [float(text == right) for text, right in zip(completions, answer)]

def loops(completions, **_):
    while "loop" in completions:
        pass
    return [1] * len(completions)

def raises(completions, **_):
    raise ZeroDivisionError("no reward today")

def dies(completions, **_):
    os._exit(0)

class Always(float):
    def __eq__(self, other): return True
    __hash__ = None

def odd(completions, **_):
    import fractions, numpy
    return [True, Always(0.25), math.nan, math.inf, None, "1", numpy.float32(3), fractions.Fraction(1, 4)]

def forks(completions, answer, pid_file, **_):
    pid = os.fork()
    if pid:
        open(pid_file[0], "w").write(str(pid))
    return [float(text == right) for text, right in zip(completions, answer)]

def starts_another(completions, pid_file, **_):
    pid = os.fork()
    if pid == 0:
        time.sleep(1000)  # longer than the test waits
    open(pid_file[0], "w").write(str(pid))
    return [1.0] * len(completions)

def starts_a_session(completions, pid_file, **_):
    import subprocess
    open(pid_file[0], "w").write(str(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid))
    return [1.0] * len(completions)

def asks(completions, **_):
    return [float(os.environ["JUDGE_API_KEY"])] * len(completions)

def number(completions, **_):
    return 1.0

def arrays(completions, **_):
    import numpy
    return numpy.arange(len(completions), dtype="float32")

"""


@pytest.fixture(scope="module")
def user(tmp_path_factory):
    path = tmp_path_factory.mktemp("user") / "my rewards.py"
    path.write_text(USER)
    calls = {}

    def call(name, deadline_s=HANG_S):
        return calls.setdefault(name, RewardWorker(f"{path}:{name}", {}, deadline_s=deadline_s))

    yield call
    for each in calls.values():
        each.close()


def test_a_busy_loop_is_cut_off_and_the_next_call_works(user):
    call = user("loops", 1.0)
    scores = call(["loop", "x"])
    assert scores.values == [None, None]
    assert scores.reasons == ["took longer than 1 s"]
    call.deadline_s = HANG_S
    assert call(["x"]).values == [1.0]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("raises", "raised ZeroDivisionError: no reward today (my rewards.py:13)"),
        ("dies", "its process died"),
        ("number", "returned a float for 2 completions"),
    ],
)
def test_a_function_that_fails_abstains(user, name, reason):
    scores = user(name)(["a", "b"])
    assert scores.values == [None, None]
    assert scores.reasons == [reason]


def test_finite_numbers_of_any_kind_count_and_nothing_else(user):
    scores = user("odd")(list("abcdefgh"))
    assert scores.values == [1.0, 0.25, None, None, None, None, 3.0, 0.25]
    assert type(scores.values[1]) is float
    assert len(scores.reasons) == 4
    assert "returned '1', which is no finite number" in scores.reasons
    assert user("arrays")(["a", "b"]).values == [0.0, 1.0]


def test_signals_that_stop_a_run_leave_the_process_alone():
    with closing(RewardWorker("repetition", {}, deadline_s=HANG_S)) as call:
        call.start()
        for _ in ("while it starts", "once it runs"):
            for each in STOP_SIGNALS:
                os.kill(call._process.pid, each)
            assert call(["a"]).values == [0.0]


def test_a_function_that_forks_answers_each_call_once(user, tmp_path):
    call = user("forks")
    for text, right, score in (("a", "a", 1.0), ("b", "x", 0.0), ("c", "c", 1.0)):
        assert call([text], answer=[right], pid_file=[str(tmp_path / text)]).values == [score]
        forked = int((tmp_path / text).read_text())
        wait_until(lambda: not is_alive(forked))  # noqa: B023 - whatever it would have said is said


@pytest.mark.parametrize("name", ["starts_another", "starts_a_session"])
def test_what_a_function_starts_ends_with_it(user, tmp_path, name):
    call = user(name)
    assert call(["a"], pid_file=[str(tmp_path / "pid")]).values == [1.0]
    pid = int((tmp_path / "pid").read_text())
    call.close()
    wait_until(lambda: not is_alive(pid))
    assert call._process is None


def test_secrets_of_the_run_reach_a_function_only_where_they_are_passed_to_it(user, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "0.5")
    call = user("asks")
    (reason,) = call(["a"]).reasons
    assert "JUDGE_API_KEY" in reason
    assert "SFTPLAY_PASS_JUDGE_API_KEY" in reason
    call.close()
    monkeypatch.setenv("SFTPLAY_PASS_JUDGE_API_KEY", "0.25")
    assert call(["a"]).values == [0.25]


def test_a_column_replaces_no_option_and_no_completion(tmp_path):
    (tmp_path / "own.py").write_text("def f(completions, most, **_): return [float(len(completions[0]) <= most)]\n")
    call = RewardWorker(f"{tmp_path}/own.py:f", {"most": 3}, deadline_s=HANG_S)
    assert call(["abc"], most=[1], completions=["abcdef"]).values == [1.0]
    call.close()


@pytest.mark.parametrize(("use", "options"), [("exact_match", {"after": "####"}), ("math", {})])
def test_a_row_without_an_answer_has_no_value_and_the_reason_says_so(use, options):
    with closing(RewardWorker(use, options, deadline_s=HANG_S)) as call:
        scores = call(["#### None", "#### 4", "#### 5"], answer=[None, "4", "4"])
    assert scores.values == [None, 1.0, 0.0]
    assert scores.reasons == ["a row has no answer"]


def test_one_answer_that_hangs_a_shipped_reward_costs_only_itself():
    with closing(RewardWorker("regex", {"pattern": r"(a+)+b"}, deadline_s=10.0)) as call:
        scores = call(["aab", "a" * 60, "ab"])
    assert scores.values == [1.0, None, 1.0]
    assert scores.reasons == ["took longer than 10 s"]


def test_a_module_that_ends_its_process_is_refused_by_name(tmp_path):
    (tmp_path / "ends.py").write_text("import os\nos._exit(0)\n")
    call = RewardWorker(f"{tmp_path}/ends.py:f", {}, deadline_s=HANG_S)
    with pytest.raises(ConfigError, match=r"ends.py:f' cannot be loaded: its process ended"):
        call(["a"])


LEFT_OPEN = """
import sys
from sftplay.reward.reward_set import RewardWorker

if __name__ == "__main__":
    call = RewardWorker("repetition", {}, deadline_s=600.0)
    call(["a"])
    print(call._process.pid, flush=True)
    sys.exit(3)
"""


def test_a_call_that_nobody_closes_does_not_keep_the_interpreter(tmp_path):
    (tmp_path / "left.py").write_text(LEFT_OPEN)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "left.py")], env=environment, capture_output=True, text=True, timeout=HANG_S,
        check=False,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert not is_alive(int(done.stdout))


KILLED = """
import sys, time
from sftplay.reward.reward_set import RewardWorker

if __name__ == "__main__":
    call = RewardWorker(sys.argv[1], {}, deadline_s=600.0)
    call(["a"], pid_file=[sys.argv[2]])
    print(call._process.pid, flush=True)
    time.sleep(1000)
"""


@pytest.mark.parametrize("name", ["starts_another", "starts_a_session"])
def test_what_a_function_has_started_ends_with_a_trainer_that_is_killed(tmp_path, name):
    (tmp_path / "rewards.py").write_text(USER)
    (tmp_path / "trainer.py").write_text(KILLED)
    command = [sys.executable, str(tmp_path / "trainer.py"), f"{tmp_path}/rewards.py:{name}", str(tmp_path / "pid")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout is not None
        process, started = int(trainer.stdout.readline()), int((tmp_path / "pid").read_text())
        assert is_alive(started)
        trainer.kill()
    wait_until(lambda: not is_alive(started) and not is_alive(process), 60.0)


def test_a_function_that_takes_too_long_to_load_is_said_so(tmp_path, monkeypatch):
    (tmp_path / "late.py").write_text(
        "import time\nwhile True: time.sleep(60)\ndef f(completions, **_): return [1.0]\n"
    )
    monkeypatch.setattr("sftplay.reward.reward_set.START_S", 0.2)
    call = RewardWorker(f"{tmp_path}/late.py:f", {}, deadline_s=HANG_S)
    assert call(["a"]).reasons == ["did not start within 0.2 s"]
    assert call._process is None
