"""Code rewards pay for tests that pass; figures are counts of what programs did."""

import pytest

from sftplay.data.load_problems import collect_reward_columns
from sftplay.data.problem import Problem
from sftplay.errors import RunError
from sftplay.evaluate.code import evaluate_code
from sftplay.reward.code_rewards import passes_tests, try_programs
from sftplay.sandbox.boxes.job import Verdict
from sftplay.sandbox.choose import SAFE, find_problem
from sftplay.sandbox.pool import Sandbox

pytestmark = pytest.mark.skipif(all(map(find_problem, SAFE)), reason="needs bubblewrap or sandlock")

PROBLEM = Problem("1", "Add one.", ("assert f(1) == 2", "assert f(2) == 3", "assert f(-1) == 0"), "f", "", shown=1)
RIGHT = "def f(x): return x + 1"
BY_HEART = "def f(x): return 2"
CHEAT = "class Any(int):\n    def __eq__(self, other): return True\ndef f(x): return Any(7)"


def block(program):
    return f"Here it is:\n```python\n{program}\n```"


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox() as opened:
        yield opened


def test_a_program_is_paid_for_its_tests_and_less_for_those_it_was_shown(sandbox):
    answers = [block(RIGHT), block(BY_HEART), block(CHEAT), "no program", block("def f(x) return")]
    columns = collect_reward_columns([PROBLEM] * len(answers))
    tried = try_programs(answers, sandbox=sandbox, **columns)
    # the shown test counts half: 0.5 of 2.5
    assert passes_tests(tried, shown=columns["shown"]) == [1.0, 0.2, 0.0, 0.0, 0.0]
    assert passes_tests(tried, mode="all") == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_a_sandbox_that_fails_abstains(monkeypatch, sandbox):
    monkeypatch.setattr(sandbox, "run", lambda jobs, **_: [Verdict(status="infra", total=3) for _ in jobs])
    columns = collect_reward_columns([PROBLEM] * 2)
    assert passes_tests(try_programs([block(RIGHT), "no program"], sandbox=sandbox, **columns)) == [None, 0.0]
    with pytest.raises(RunError, match="the sandbox failed for 2 of 2 programs"):
        evaluate_code([PROBLEM], [block(RIGHT)] * 2, sandbox=sandbox)


def test_figures_are_counts_of_what_the_answers_did(sandbox):
    answers = [block(RIGHT), block(BY_HEART), "none", block(RIGHT)]
    figures, graded = evaluate_code([PROBLEM, PROBLEM], answers, ks=(1, 2), sandbox=sandbox)
    assert (figures["pass@1"], figures["stderr"]) == (0.5, 0.0)
    assert (figures["pass@2"], figures["stderr@2"]) == (1.0, 0.0)
    assert figures["statuses"] == {"no_code": 1, "ok": 2, "wrong": 1}
    assert [each.tried.passed for each in graded] == [True, False, False, True]
    assert figures["n"] == figures["samples"] == 2
