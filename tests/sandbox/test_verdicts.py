"""What becomes of a program: each status, each way to judge, and honest programs that are written in odd ways."""

from __future__ import annotations

import pytest
from processes import HANG_S

from sftplay.errors import DataError
from sftplay.sandbox.boxes.job import Job, Limits, job_from_dict
from sftplay.sandbox.boxes.judge import plan_tests

ADD_ONE = "def f(x):\n    return x + 1"


@pytest.mark.parametrize(
    ("tests", "mode"),
    [
        (["assert f(1) == 2", "assert f([1], k={'a': (2,)}) != [1]", "assert f('')", "assert not f(b'')"], "pair"),
        (["assert f(-1) is None"], "pair"),
        (["assert sum(1, 2) == 3"], "pair"),
        (["assert f(1) == 2", "assert set(f(1)) == {2}"], "proxy"),
        (["import math\nassert math.isclose(f(1), 2)"], "proxy"),
        (["def check(g):\n    for n in range(3):\n        assert g(n) == n + 1\ncheck(f)"], "proxy"),
        (["assert f(x)(2) == 3"], "proxy"),
        (["assert depth(build([1, 2])) == 2"], "proxy"),
        (["assert longest([Pair(1, 2)]) == 1"], "in_process"),
        (["assert build([1, 2]).head == 1"], "in_process"),
        (["node = build([1])\nassert depth(node) == 1\nassert node.head == 1"], "in_process"),
        (["x = f('a')\nassert x.upper() == 'A'"], "proxy"),
        ([], "none"),
    ],
)
def test_tests_are_judged_in_the_strongest_way_that_their_form_allows(tests, mode):
    assert plan_tests(Job(code="", tests=tuple(tests))).mode == mode


HONEST = {
    "a value": (ADD_ONE, ["assert f(1) == 2"]),
    "several functions": ("def f(x): return x\ndef g(x): return f(x) + 1", ["assert g(1) == 2"]),
    "a function named as one of Python's": ("def sum(a, b): return a + b", ["assert sum(1, 2) == 3"]),
    "a generator": ("def f(x): yield from range(x)", ["assert list(f(3)) == [0, 1, 2]"]),
    "a changed argument": ("def f(x): x.sort()", ["y = [3, 1]\nf(y)\nassert y == [1, 3]"]),
    "an exception": ("def f(x): raise KeyError(x)", ["try:\n    f(1)\n    assert 0\nexcept KeyError:\n    pass"]),
    "a class of its own": ("class P: pass\ndef f(x): return isinstance(x, P)", ["assert f(P())"]),
    "a function handed over": ("def f(g): return g(2)", ["assert f(lambda x: x + 1) == 3"]),
    "an object that goes from one function to another": (
        "class N:\n    def __init__(self, v): self.v = v\ndef make(v): return [N(v), iter([v])]\n"
        "def read(n): return n[0].v + sum(n[1])",
        ["assert read(make(3)) == 6", "n = make(4)\nassert read(n) == 8", "assert make(3)[0]"],
    ),
    "an object that the test looks into": (
        "class N:\n    def __init__(self, v): self.v = v\ndef make(v): return N(v)", ["n = make(3)\nassert n.v == 3"],
    ),
    "a match object is true": (
        "import re\ndef f(x): return re.match('a', x)", ["assert f('ab')", "assert not f('b')"],
    ),
    "a module that only the program imports": (
        "import sys\ndef f(x): return x", ["assert f(3) == sys.float_info.radix + 1"],
    ),
    "its own main part is not run": (ADD_ONE + "\nif __name__ == '__main__':\n    input()", ["assert f(1) == 2"]),
    "it prints": (ADD_ONE + "\nprint('hello')", ["assert f(1) == 2"]),
    "it warns": ("import warnings\nwarnings.warn('old')\n" + ADD_ONE, ["assert f(1) == 2"]),
    "a dataclass": (
        "from dataclasses import dataclass\n@dataclass\nclass D:\n    a: int\ndef f(x): return D(x).a",
        ["assert f(1) == 1"],
    ),
    "a fraction": (
        "from fractions import Fraction\ndef f(): return Fraction(1, 2)", ["assert f() == 0.5", "assert f()"],
    ),
    "a decimal": (
        "from decimal import Decimal\ndef f(): return [Decimal('0.50')]",
        ["assert f() == [0.5]", "from decimal import Decimal\nassert sum(f()) == Decimal('0.5')"],
    ),
    "the keys of a dict": (
        "def f(): return {1: 2}.keys()", ["assert f() == {1}", "assert sorted(f()) == [1]\nassert len(f()) == 1"],
    ),
    "a date": (
        "import datetime\ndef f(): return datetime.date(2020, 1, 2)", ["assert f() == datetime.date(2020, 1, 2)"],
    ),
    "a date handed over": (
        "def f(day): return day.year", ["import datetime\nassert f(datetime.date(2020, 1, 2)) == 2020"],
    ),
    "a deque": ("from collections import deque\ndef f(): return deque([1])", ["assert list(f()) == [1]"]),
    "it writes a file": (
        "def f(x):\n    open('a', 'w').write(x)\n    return open('a').read()", ["assert f('b') == 'b'"],
    ),
}  # fmt: skip


def test_an_honest_program_passes_however_it_is_written(verdict_of):
    verdicts = {name: verdict_of(code, *tests) for name, (code, tests) in HONEST.items()}
    assert {name: verdict for name, verdict in verdicts.items() if verdict.status != "ok"} == {}
    assert all(verdict.passed == verdict.total for verdict in verdicts.values())


def test_each_failure_has_its_own_status_and_says_where(verdict_of):
    quick = Limits(timeout_s=3, test_timeout_s=0.3)
    assert verdict_of("def f(x): return 3", "assert f(1) == 2").status == "wrong"
    assert verdict_of("def f(x:", "assert f(1) == 2").status == "syntax"
    raised = verdict_of("\n\ndef f(x): return 1 / 0", "assert f(1) == 2")
    assert (raised.status, raised.stderr) == ("runtime", "ZeroDivisionError: division by zero (line 3)")
    assert verdict_of("", "assert f(1) == 2").status == "runtime"
    assert verdict_of("def f(x): return ' ' * (1 << 40)", "assert f(1) == 2").status == "memory"
    assert verdict_of("def f(x):\n    while x: pass", "assert f(1) == 2", limits=quick).status == "timeout"


def test_one_test_that_loops_costs_only_itself(verdict_of):
    code = "def f(x):\n    while x == 2: pass\n    return x"
    limits = Limits(timeout_s=HANG_S, test_timeout_s=4)
    verdict = verdict_of(code, "assert f(1) == 1", "assert f(2) == 2", "assert f(3) == 3", limits=limits)
    assert verdict.per_test == ("ok", "timeout", "ok")
    assert (verdict.status, verdict.passed, verdict.total) == ("timeout", 2, 3)


def test_a_setup_that_fails_is_the_machinery_and_not_the_program(verdict_of):
    verdict = verdict_of(ADD_ONE, "assert f(1) == 2", setup="import no_such_module")
    assert (verdict.status, verdict.passed) == ("infra", 0)
    assert "no_such_module" in verdict.stderr
    code = "class Node:\n    def __init__(self, v): self.v = v\ndef f(n): return n.v"  # it may use names of the program
    assert verdict_of(code, "assert f(root) == 4", setup="root = Node(4)").status == "ok"


@pytest.mark.parametrize(
    ("row", "where"),
    [
        ([], ""), ({}, "code"), ({"code": 3}, "code"), ({"code": "", "tests": "assert 1"}, "tests"),
        ({"code": "", "tests": ["assert f("]}, "tests[0]"), ({"code": "", "setup": "import"}, "setup"),
        ({"code": "", "test": []}, "test"), ({"code": "", "limits": {"time": 3}}, "limits.time"),
        ({"code": "", "limits": {"timeout_s": -1}}, "timeout_s"),
        ({"code": "", "limits": {"timeout_s": "1"}}, "timeout_s"),
        ({"code": "", "limits": {"processes": 1.5}}, "processes"),
    ],
)  # fmt: skip
def test_a_job_that_is_none_is_refused_with_the_place(row, where):
    with pytest.raises(DataError) as caught:
        job_from_dict(row, limits=Limits())
    assert caught.value.where == where
    assert caught.value.fix


def test_what_it_prints_is_seen_though_it_flushes_nothing(verdict_of):
    verdict = verdict_of("print(7)\nimport sys\nsys.stderr.write('eight')\n" + ADD_ONE, "assert f(1) == 2")
    assert (verdict.status, sorted(verdict.stderr.split())) == ("ok", ["7", "eight"])
    ended = verdict_of("def f(x):\n    print('nearly', flush=True)\n    import os\n    os._exit(0)", "assert f(1) == 2")
    assert (ended.status, ended.stderr) == ("killed", "nearly")


@pytest.mark.parametrize("tests", [["assert f(f(2)) == 4"], ["x = f(2)\nassert f([x]) == [4]"]])
def test_no_value_of_the_program_has_its_tests_judged_more_weakly(verdict_of, tests):
    equal = "class E:\n    def __eq__(self, other): return True\ndef f(x): return E()"
    verdict = verdict_of(equal, *tests)
    assert (verdict.status, verdict.mode) == ("wrong", "proxy")
