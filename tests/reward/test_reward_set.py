"""All rewards of a config together: side by side, in order, each with its deadline. What is not known is counted."""

from multiprocessing import get_context
from threading import Thread

import pytest
from patience import PATIENT_BOX
from processes import HANG_S, wait_until

from sftplay.config.run import RunConfig
from sftplay.errors import RunError
from sftplay.reward.reward_set import BatchRewards, MissingRewardMonitor, RewardSet, combined, kill_group
from sftplay.reward.table import RewardValues
from sftplay.sandbox.pool import SAFE, find_problem

needs_boxes = pytest.mark.skipif(all(map(find_problem, SAFE)), reason="needs bubblewrap or sandlock")

USER = """
import os, time

def meets_two_others(completions, folder, **_):
    # it answers once three processes are asked
    open(f"{folder[0]}/{os.getpid()}", "w").close()
    while len(os.listdir(folder[0])) < 3:
        time.sleep(0.01)
    return [0.25 for _ in completions]

def loops(completions, begun=None, **_):
    if begun:
        open(begun[0], "w").close()
    while True:
        pass
"""

TESTS = {
    "tests": [["assert f(1) == 2", "assert f(2) == 3", "assert f(5) == 6"]] * 4,
    "entry_point": ["f"] * 4,
    "setup": ["", None, "", ""],
    "shown": [1, 1, None, 0],
}


@pytest.fixture
def user(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(USER)
    return path


def config(*rewards, **sandbox):
    """Rewards r0, r1, ...; no busy machine cuts them or programs off where nothing else is said."""
    listed = [{"name": f"r{number}", "deadline": HANG_S, **reward} for number, reward in enumerate(rewards)]
    box = {**PATIENT_BOX, **sandbox}
    return RunConfig.model_validate({"model": {"name": "builtin:tiny"}, "rewards": listed, "sandbox": box})


def block(program):
    return f"```python\n{program}\n```"


def test_the_reward_of_an_environment_is_what_it_gave_and_none_where_it_gave_none():
    with RewardSet(config({"use": "environment"})) as rewards:
        scored = rewards.score(["a", "b"], {"environment_reward": [0.5, None], "shown": [1, 1]})
    assert scored.by_name["r0"].values == [0.5, None]


def test_rewards_are_asked_side_by_side_and_answer_in_the_order_of_the_config(user, tmp_path):
    names = ["exact_match", *[f"{user}:meets_two_others"] * 3]
    (tmp_path / "asked").mkdir()
    with RewardSet(config(*({"use": name, "weight": n} for n, name in enumerate(names)))) as rewards:
        scored = rewards.score(["7", "8"], {"answer": ["7", "7"], "folder": [str(tmp_path / "asked")] * 2})
        assert rewards.names == tuple(scored.by_name) == ("r0", "r1", "r2", "r3")
        assert rewards.weights == (0.0, 1.0, 2.0, 3.0)
    assert [scores.values for scores in scored.by_name.values()] == [[1.0, 0.0], *[[0.25, 0.25]] * 3]
    assert scored.verdicts == [None, None]
    assert combined(scored, rewards.weights) == [1.5, 1.5]


@needs_boxes
def test_programs_are_paid_for_tests_and_their_verdicts_are_kept():
    cfg = config({"use": "code_tests"}, {"use": "format"}, {"use": "code_tests", "options": {"mode": "all"}})
    answers = [block("def f(x): return x + 1"), block("def f(x): return 2"), block("def f(x): return 2"), "f"]
    with RewardSet(cfg) as rewards:
        scored = rewards.score(answers, TESTS)
        assert rewards.executor in SAFE
    # The first test of three counts half where it was shown: 0.5 of 2.5; else a third.
    assert scored.by_name["r0"].values == [1.0, 0.2, 1 / 3, 0.0]
    assert scored.by_name["r1"].values == [1.0, 1.0, 1.0, 0.0]
    assert scored.by_name["r2"].values == [1.0, 0.0, 0.0, 0.0]
    assert [verdict["status"] for verdict in scored.verdicts] == ["ok", "wrong", "wrong", "no_code"]
    assert [(verdict["passed"], verdict["total"]) for verdict in scored.verdicts[:3]] == [(3, 3), (1, 3), (1, 3)]


@needs_boxes
def test_the_config_s_limits_hold_in_the_boxes():
    loops, greedy = "def f(x):\n    while True: pass", "def f(x):\n    return len(bytearray(400 << 20)) * 0 + x + 1"
    hasty, small = {"timeout": 1.0, "test_timeout": 0.5}, {"memory": "256MiB"}
    for program, limits, status in ((loops, hasty, "timeout"), (greedy, small, "memory")):
        with RewardSet(config({"use": "code_tests"}, **limits)) as rewards:
            scored = rewards.score([block(program)], {"tests": [["assert f(1) == 2"]]})
        assert [verdict["status"] for verdict in scored.verdicts] == [status]
        assert scored.by_name["r0"].values == [0.0]


def test_closing_ends_a_call_that_loops_in_another_thread(user, tmp_path):
    rewards = RewardSet(config({"use": f"{user}:loops"}, {"use": "repetition"}))
    found = []
    thread = Thread(target=lambda: found.append(rewards.score(["a"], {"begun": [str(tmp_path / "begun")]})))
    thread.start()
    wait_until((tmp_path / "begun").exists)
    rewards.close()
    thread.join(timeout=HANG_S)
    assert found[0].by_name["r0"].values == [None]


def test_a_process_that_another_thread_has_closed_is_ended_without_an_error():
    process = get_context("spawn").Process(target=int)
    process.start()
    process.join(timeout=HANG_S)
    process.close()
    kill_group(process)


def scored(values, reasons=(), n=8):
    return BatchRewards({"known": RewardValues([1.0] * n), "odd": RewardValues(values, list(reasons))}, [None] * n)


def test_what_a_sum_does_not_know_is_left_out_and_a_weight_of_0_only_measures():
    found = BatchRewards({"a": RewardValues([1.0, None, None]), "b": RewardValues([0.5, 0.5, None])}, [None] * 3)
    assert combined(found, [2.0, 4.0]) == [4.0, 2.0, None]
    assert combined(found, [2.0, 0.0]) == [2.0, None, None]


def test_one_answer_in_twenty_may_be_unknown_and_one_more_stops():
    counter = MissingRewardMonitor()
    for _ in range(8):  # 8 of 160 answers are one in twenty
        counter.add(scored([None] + [1.0] * 7))
    for _ in range(12):
        counter.add(scored([1.0] * 8))
    for _ in range(8):  # the first eight leave the window as these come
        counter.add(scored([None] + [1.0] * 7))
    with pytest.raises(RunError, match=r"9 of the 160 answers of the last 20 calls have no value of odd"):
        counter.add(scored([None] + [1.0] * 7, ["raised ValueError: no"]))


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("raised ValueError: no", "mend the function"),
        ("took longer than 0.5 s", "raise rewards.odd.deadline"),
        ("the sandbox failed: no box", "--self-test"),
        ("the environment failed: step took longer than 10 s", "grpo.step_deadline"),
    ],
)
def test_a_reward_that_fails_stops_the_run_by_name_with_its_remedy(reason, remedy):
    counter = MissingRewardMonitor()
    counter.add(scored([None] * 8, [reason]))
    with pytest.raises(RunError, match=reason) as refusal:  # known to be too many for 20 calls as well
        counter.add(scored([None] * 8, [reason]))
    assert refusal.value.where == "rewards.odd"
    assert remedy in refusal.value.fix
    assert "16 of the 16 answers" in refusal.value.what
