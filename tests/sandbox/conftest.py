"""The executors that isolate on this machine; a test that needs another one is skipped and says what is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from sftplay.sandbox.choose import SAFE, choose_executor, problem_of
from sftplay.sandbox.executors.executor import Executor
from sftplay.sandbox.verdicts.job import Job, Verdict
from sftplay.sandbox.verdicts.judge import judge


@pytest.fixture(params=list(SAFE))
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    """Each executor, by fresh boxes."""
    if problem := problem_of(request.param):
        pytest.skip(f"needs {request.param}: {problem}")
    opened = choose_executor(request.param, is_warm=False)()
    yield opened
    opened.close()


@pytest.fixture
def verdict_of(executor: Executor) -> Callable[..., Verdict]:
    """The verdict of a program with these tests."""

    def ask(code: str, *tests: str, **options: object) -> Verdict:
        job = Job(code=code, tests=tests, **options)
        return judge(job, lambda: executor.open(job.limits), executor=executor.name)

    return ask
