"""Problems with a failing reference solution are left out and named; references run once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from patience import PATIENT

from sftplay.data.load_problems import LIMITS, sound_problems
from sftplay.data.problem import Problem
from sftplay.errors import RunError
from sftplay.sandbox.boxes.job import Verdict
from sftplay.sandbox.pool import SAFE, Sandbox, find_problem

pytestmark = pytest.mark.skipif(all(map(find_problem, SAFE)), reason="needs bubblewrap or sandlock")

GOOD = Problem("1", "Add one.", ("assert f(1) == 2", "assert f(2) == 3"), "f", "def f(x): return x + 1")
WRONG = replace(GOOD, task_id="2", reference="def f(x): return 2")
NO_LIBRARY = replace(GOOD, task_id="3", setup="import there_is_no_such_library")
NO_PYTHON = replace(GOOD, task_id="4", reference="def f(x) return x")
TOO_SLOW = replace(GOOD, task_id="5", reference="def f(x):\n    while True: pass")


@pytest.fixture
def sandbox(tmp_path, monkeypatch):
    monkeypatch.setenv("SFTPLAY_CACHE", str(tmp_path))
    with Sandbox() as opened:
        yield opened


class Counting:
    """Stands for a sandbox and counts what it is asked."""

    executor = version = "counting"

    def __init__(self, *statuses):
        self.statuses, self.alone, self.together = list(statuses), 0, 0

    def run(self, jobs):
        self.together += len(jobs)
        return [Verdict(status=self.statuses.pop(0), passed=2, total=2) for _ in jobs]

    def run_again(self, job):
        self.alone += 1
        return Verdict(status=self.statuses.pop(0), passed=2, total=2, stderr="no box")


def test_a_problem_whose_solution_fails_is_left_out_and_named(sandbox, capsys, monkeypatch):
    judge = sandbox._judge
    hasty = replace(
        PATIENT, timeout_s=0.4, test_timeout_s=0.2
    )  # for what never ends; a machine may be slow with others
    monkeypatch.setattr(
        sandbox, "_judge", lambda job: judge(replace(job, limits=hasty) if job.code == TOO_SLOW.reference else job)
    )
    sound, failed = sound_problems([GOOD, WRONG, NO_LIBRARY, NO_PYTHON, TOO_SLOW], sandbox, limits=PATIENT)
    assert sound == [GOOD]
    assert {task_id: why.split()[0] for task_id, why in failed.items()} == {
        "2": "wrong", "3": "the", "4": "syntax", "5": "timeout"
    }  # fmt: skip
    assert failed["3"].startswith("the setup of the job: ModuleNotFoundError")
    said = capsys.readouterr().out
    assert "problem 2 is left out: its reference solution does not pass: wrong" in said
    assert "the reference solutions of 4 of 5 problems do not pass" in said


def test_references_run_once_for_the_same_problems_limits_and_executor(sandbox):
    box = Counting("ok", "ok")
    for _ in range(2):
        assert sound_problems([GOOD, WRONG], box) == ([GOOD, WRONG], {})
    assert box.together == 2
    for change in ({"problems": [GOOD]}, {"limits": replace(LIMITS, timeout_s=9)}, {"version": "another"}):
        again = Counting("ok", "ok")
        again.version = change.get("version", box.version)
        sound_problems(change.get("problems", [GOOD, WRONG]), again, limits=change.get("limits", LIMITS))
        assert again.together == len(change.get("problems", [GOOD, WRONG])), change


def test_a_solution_that_was_too_slow_beside_others_is_tried_alone(sandbox):
    box = Counting("timeout", "ok", "ok")
    assert sound_problems([GOOD, WRONG], box) == ([GOOD, WRONG], {})
    assert box.alone == 1


def test_a_sandbox_that_fails_says_nothing_of_a_solution_and_nothing_is_kept(sandbox):
    with pytest.raises(RunError, match=r"the sandbox failed \(no box\)"):
        sound_problems([GOOD], Counting("infra", "infra"))
    assert sound_problems([GOOD], Counting("infra", "ok")) == ([GOOD], {})


def test_a_solution_that_is_too_slow_on_a_busy_machine_is_not_lost_for_good(sandbox):
    assert sound_problems([GOOD, WRONG], Counting("ok", "timeout", "timeout"))[0] == [GOOD]
    assert sound_problems([GOOD, WRONG], Counting("ok", "ok"))[0] == [GOOD, WRONG]
