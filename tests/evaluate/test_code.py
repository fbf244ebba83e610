"""Figures of programs are counts of what they did."""

import pytest

from sftplay.data.problem import Problem
from sftplay.errors import RunError
from sftplay.evaluate.code import evaluate_code
from sftplay.sandbox.boxes.job import Verdict
from sftplay.sandbox.pool import SAFE, Sandbox, find_problem

pytestmark = pytest.mark.skipif(all(map(find_problem, SAFE)), reason="needs bubblewrap or sandlock")

PROBLEM = Problem("1", "Add one.", ("assert f(1) == 2", "assert f(2) == 3", "assert f(-1) == 0"), "f", "", shown=1)
RIGHT = "```python\ndef f(x): return x + 1\n```"
BY_HEART = "```python\ndef f(x): return 2\n```"


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox() as opened:
        yield opened


def test_a_sandbox_that_fails_is_no_figure(monkeypatch, sandbox):
    monkeypatch.setattr(sandbox, "run", lambda jobs, **_: [Verdict(status="infra", total=3) for _ in jobs])
    with pytest.raises(RunError, match="the sandbox failed for 2 of 2 programs"):
        evaluate_code([PROBLEM], [RIGHT] * 2, sandbox=sandbox)


def test_figures_are_counts_of_what_the_answers_did(sandbox):
    answers = [RIGHT, BY_HEART, "none", RIGHT]
    figures, graded = evaluate_code([PROBLEM, PROBLEM], answers, ks=(1, 2), sandbox=sandbox)
    assert (figures["pass@1"], figures["stderr"]) == (0.5, 0.0)
    assert (figures["pass@2"], figures["stderr@2"]) == (1.0, 0.0)
    assert figures["statuses"] == {"no_code": 1, "ok": 2, "wrong": 1}
    assert [each.tried.passed for each in graded] == [True, False, False, True]
    assert figures["n"] == figures["samples"] == 2
