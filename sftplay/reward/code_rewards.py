"""The reward for programs: the tests that they pass in the sandbox. Where the sandbox fails there is no value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from sftplay.reward.code_answer import find_code
from sftplay.reward.completions import Completion
from sftplay.sandbox.pool import Sandbox
from sftplay.sandbox.verdicts.job import Job, Verdict

MACHINERY = "infra"
"""The status that says nothing of the program."""

SHOWN_WEIGHT = 0.5
"""What a test counts that stood in the prompt, beside 1 for a hidden one: it can be passed by heart."""


def passes_tests(
    completions: Sequence[Completion],
    *,
    tests: Sequence[Sequence[str]],
    sandbox: Sandbox,
    setup: Sequence[str] | None = None,
    entry_point: Sequence[str] | None = None,
    shown: Sequence[int] | None = None,
    mode: Literal["fraction", "all"] = "fraction",
    shown_weight: float = SHOWN_WEIGHT,
    **_: Any,
) -> list[float | None]:
    """The share of the row's tests that the completion's program passes; with `mode: all` 1 for all of them, else 0.

    The first `shown` tests of a row stood in its prompt and count `shown_weight` each, the others 1. A completion
    without a program gets 0. None where the sandbox failed.
    """
    n = len(completions)
    points = entry_point or [""] * n
    programs = [find_code(each, point or "").code for each, point in zip(completions, points, strict=True)]
    jobs = [
        Job(code=code, tests=tuple(row), setup=before or "", entry_point=point or None)
        for code, row, before, point in zip(programs, tests, setup or [""] * n, points, strict=True)
    ]
    has_code = [bool(code.strip()) for code in programs]
    verdicts = iter(sandbox.run([job for job, is_there in zip(jobs, has_code, strict=True) if is_there]))
    scores: list[float | None] = []
    for is_there, count in zip(has_code, shown or [0] * n, strict=True):
        scores.append(_score(next(verdicts), shown=count, mode=mode, shown_weight=shown_weight) if is_there else 0.0)
    return scores


def _score(verdict: Verdict, *, shown: int, mode: str, shown_weight: float) -> float | None:
    if verdict.status == MACHINERY:
        return None
    if mode == "all":
        return float(verdict.total > 0 and verdict.passed == verdict.total)
    weights = [shown_weight if at < shown else 1.0 for at in range(len(verdict.per_test))]
    passed = sum(weight for weight, status in zip(weights, verdict.per_test, strict=True) if status == "ok")
    return passed / sum(weights) if sum(weights) else 0.0
