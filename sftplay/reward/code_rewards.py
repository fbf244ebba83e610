"""The reward for programs: the tests that they pass in the sandbox. Where the sandbox fails there is no value."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sftplay.config.rewards import CODE_TESTS, SandboxConfig
from sftplay.errors import DataError
from sftplay.reward.calls import RewardValues
from sftplay.reward.code_answer import CodeAnswer, Completion, find_code
from sftplay.sandbox.boxes.job import Job, Limits, Verdict
from sftplay.sandbox.pool import Sandbox
from sftplay.units import parse_bytes

MACHINERY = "infra"
"""The status that says nothing of the program."""

NO_CODE = "no_code"
"""The status of an answer in which no program was found."""


@dataclass(frozen=True, slots=True)
class Tried:
    """An answer's program, and what became of it."""

    found: CodeAnswer
    verdict: Verdict | None
    """None where there was no program."""

    @property
    def status(self) -> str:
        """The verdict's status, or NO_CODE."""
        return self.verdict.status if self.verdict else NO_CODE

    @property
    def passed(self) -> bool:
        """Whether there are tests and all of them passed."""
        return self.verdict is not None and 0 < self.verdict.total == self.verdict.passed and self.status == "ok"

    def as_json(self) -> dict[str, Any]:
        """Return it as it is written next to an answer."""
        verdict = self.verdict.as_dict() if self.verdict else {"status": NO_CODE}
        return {"how": self.found.how, **verdict}


def try_programs(
    completions: Sequence[Completion],
    *,
    sandbox: Sandbox,
    tests: Sequence[Sequence[str] | None],
    setup: Sequence[str | None] | None = None,
    entry_point: Sequence[str | None] | None = None,
    limits: Limits | None = None,
    within_s: float | None = None,
    **_: Any,
) -> list[Tried]:
    """Find the program of each completion and run it against the tests of its row, in the order of the completions.

    Training and evaluation both call it, so that they read and judge answers alike. The columns are those of
    `data.load_problems.collect_reward_columns`. An answer without a program is not run. With `within_s` what has no
    verdict by then is `infra`. Raise DataError where a test or a setup is no Python.
    """
    n = len(completions)
    points, before = entry_point or [None] * n, setup or [None] * n
    found = [find_code(completion, point or "") for completion, point in zip(completions, points, strict=True)]
    limits = limits or Limits()
    jobs = [
        Job(code=answer.code, tests=tuple(row or ()), setup=first or "", entry_point=point or None, limits=limits)
        for answer, row, first, point in zip(found, tests, before, points, strict=True)
        if answer.code.strip()
    ]
    verdicts = iter(sandbox.run(jobs, within_s=within_s))
    return [Tried(answer, next(verdicts) if answer.code.strip() else None) for answer in found]


def passes_tests(
    tried: Sequence[Tried],
    *,
    shown: Sequence[int | None] | None = None,
    mode: Literal["fraction", "all"] = "fraction",
    shown_weight: float = 0.5,
) -> list[float | None]:
    """Return the share of its row's tests that each program passes; with `mode: all` 1 for all of them, else 0.

    The first `shown` tests of a row stood in its prompt, so that they can be passed by heart: they count `shown_weight`
    each, the others 1. A completion without a program gets 0. None where the sandbox failed, or without tests.

    >>> ok = Verdict(status="wrong", per_test=("ok", "wrong", "ok"), passed=2, total=3)
    >>> passes_tests([Tried(CodeAnswer("...", "labelled"), ok)], shown=[1])
    [0.6]
    """
    scores: list[float | None] = []
    for program, n_shown in zip(tried, shown or [0] * len(tried), strict=True):
        verdict = program.verdict
        if verdict is None:
            scores.append(0.0)
        elif verdict.status == MACHINERY or not verdict.total:
            scores.append(None)
        elif mode == "all":
            scores.append(float(verdict.passed == verdict.total))
        else:
            weights = [shown_weight if at < (n_shown or 0) else 1.0 for at in range(len(verdict.per_test))]
            passed = sum(weight for weight, status in zip(weights, verdict.per_test, strict=True) if status == "ok")
            scores.append(passed / sum(weights) if sum(weights) else 0.0)
    return scores


def passes_hidden(tried: Tried, *, tests: int, shown: int) -> bool | None:
    """Say whether a program passes all of its row's `tests` but the first `shown`, which stood in the prompt.

    None where the sandbox failed, or where all of them stood there.

    >>> known = Verdict(status="wrong", per_test=("wrong", "ok", "ok"), passed=2, total=3)
    >>> passes_hidden(Tried(CodeAnswer("...", "labelled"), known), tests=3, shown=1)
    True
    """
    if tests <= shown or tried.status == MACHINERY:
        return None
    rest = tried.verdict.per_test[shown:] if tried.verdict else ()
    return len(rest) == tests - shown and set(rest) == {"ok"}


def read_limits(config: SandboxConfig) -> Limits:
    """Read the limits of a program from the config."""
    memory = parse_bytes(str(config.memory))
    return Limits(timeout_s=config.timeout, test_timeout_s=config.test_timeout, memory_bytes=memory)


class CodeTests:
    """The reward code_tests, called as a `RewardWorker` is; programs run in boxes instead of a process."""

    use = CODE_TESTS

    def __init__(self, options: Mapping[str, Any], *, sandbox: Sandbox, limits: Limits, deadline_s: float) -> None:
        """`deadline_s` is for one completion. A box ends each program in time; the deadline is for boxes that hang."""
        self.options, self.deadline_s = dict(options), deadline_s
        self._sandbox, self._limits = sandbox, limits

    def __call__(self, completions: Sequence[Any], /, **columns: Any) -> RewardValues:
        """Score the completions; `columns` are aligned with them. The values come with verdicts."""
        turns = math.ceil(len(completions) / self._sandbox.workers)
        names = ("tests", "setup", "entry_point")  # rows may have a column `limits`
        read = {name: columns[name] for name in names if name in columns}
        shown = columns.get("shown") or [0] * len(completions)
        try:
            tried = try_programs(
                completions, sandbox=self._sandbox, limits=self._limits, within_s=self.deadline_s * turns, **read
            )
        except DataError as error:
            failed = [{"status": MACHINERY} for _ in completions]
            return RewardValues([None] * len(completions), [str(error)], failed)
        verdicts = [program.verdict for program in tried if program.verdict]
        reasons = [f"the sandbox failed: {verdict.stderr}" for verdict in verdicts if verdict.status == MACHINERY]
        reasons += ["a row has no tests" for found in verdicts if found.status != MACHINERY and not found.total]
        lines = [
            {**program.as_json(), "hidden_pass": passes_hidden(program, tests=len(tests or ()), shown=n_shown or 0)}
            for program, tests, n_shown in zip(tried, columns["tests"], shown, strict=True)
        ]
        return RewardValues(passes_tests(tried, shown=shown, **self.options), list(dict.fromkeys(reasons)), lines)
