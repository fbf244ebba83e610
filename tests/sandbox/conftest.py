"""The executors that isolate on this machine; a test that needs another one is skipped and says what is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from patience import PATIENT

from sftplay.sandbox.boxes.executors import Executor
from sftplay.sandbox.boxes.job import Job, Verdict
from sftplay.sandbox.boxes.judge import judge
from sftplay.sandbox.pool import SAFE, WARM, find_problem

KINDS = [(name, True) for name in WARM] + [(name, False) for name in SAFE]

SLOW = [("landlock", False)]


def kind_of(name: str, is_warm: bool) -> object:
    marks = [pytest.mark.slow] if (name, is_warm) in SLOW else []
    return pytest.param((name, is_warm), id=f"{name}, warm" if is_warm else name, marks=marks)


@pytest.fixture(params=[kind_of(*kind) for kind in KINDS])
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    """Each executor, with a new box for each program and out of one that waits."""
    name, is_warm = request.param
    if problem := find_problem(name, is_warm=is_warm):
        pytest.skip(f"needs {name}: {problem}")
    opened = (WARM if is_warm else SAFE)[name]()
    yield opened
    opened.close()


@pytest.fixture
def verdict_of(executor: Executor) -> Callable[..., Verdict]:
    """The verdict of a program with these tests; it has all the time it needs where `limits` do not say otherwise."""

    def ask(code: str, *tests: str, **options: object) -> Verdict:
        job = Job(code=code, tests=tests, **{"limits": PATIENT, **options})
        return judge(job, executor)

    return ask
