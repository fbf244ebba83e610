"""A model's programs against the tests of programming problems: pass@1, pass@k, and how the failures ended."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, pstdev
from typing import Any

from sftplay.config.rewards import SandboxConfig
from sftplay.data.problems.load import LIMITS, collect_reward_columns
from sftplay.data.problems.problem import PROMPT_VERSION, Problem
from sftplay.errors import RunError
from sftplay.reward.code_rewards import Tried, read_limits, try_programs
from sftplay.sandbox.pool import Sandbox
from sftplay.sandbox.verdicts.job import Limits

MOST_UNKNOWN = 0.05
"""Share of answers for which the sandbox may fail before the figure would say nothing."""


@dataclass(frozen=True, slots=True)
class Graded:
    """One answer to one problem."""

    problem: Problem
    answer: str
    tried: Tried

    def as_json(self) -> dict[str, Any]:
        """A line of eval/code-N.jsonl."""
        return {
            "task_id": self.problem.task_id,
            "answer": self.answer,
            "passed": self.tried.passed,
            **self.tried.as_json(),
        }


def measuring_limits(config: SandboxConfig) -> Limits:
    """The limits of what is measured: LIMITS, or those of the config where it gives a program more."""
    own = read_limits(config)
    return replace(
        LIMITS,
        timeout_s=max(LIMITS.timeout_s, own.timeout_s),
        test_timeout_s=max(LIMITS.test_timeout_s, own.test_timeout_s),
        memory_bytes=max(LIMITS.memory_bytes, own.memory_bytes),
    )


def grade(
    problems: Sequence[Problem], answers: Sequence[str], *, sandbox: Sandbox, limits: Limits = LIMITS
) -> list[Graded]:
    """Each answer with what its program does in the sandbox; `answers` are aligned with `problems`."""
    columns: dict[str, Any] = collect_reward_columns(problems)
    tried = try_programs(answers, sandbox=sandbox, limits=limits, **columns)
    return [Graded(*each) for each in zip(problems, answers, tried, strict=True)]


def evaluate_code(
    problems: Sequence[Problem],
    answers: Sequence[str],
    *,
    ks: Sequence[int] = (1,),
    sandbox: Sandbox,
    limits: Limits = LIMITS,
) -> tuple[dict[str, Any], list[Graded]]:
    """Grade the answers, which stand beside each other for each problem: the figures, and every answer graded.

    The figures are `pass@k` and its standard error over the problems (`stderr` for the first k, else `stderr@k`), and
    counts by status.

    Raises:
        RunError: the sandbox failed for too many answers.
    """
    n = len(answers) // len(problems)
    graded = grade([problem for problem in problems for _ in range(n)], answers, sandbox=sandbox, limits=limits)
    statuses = Counter(each.tried.status for each in graded)
    if statuses["infra"] > MOST_UNKNOWN * len(graded):
        raise RunError(
            f"the sandbox failed for {statuses['infra']:,} of {len(graded):,} programs",
            where=sandbox.executor,
            fix="`make sandbox ARGS=--self-test` says what is wrong with it",
        )
    right = [sum(each.tried.passed for each in graded[at : at + n]) for at in range(0, len(graded), n)]
    figures: dict[str, Any] = {"n": len(problems), "samples": n, "k": list(ks)}
    for k in ks:
        figures[f"pass@{k}"], figures["stderr" if k == ks[0] else f"stderr@{k}"] = mean_pass_at_k(right, n=n, k=k)
    figures |= {
        "statuses": dict(sorted(statuses.items())),
        "found": dict(Counter(each.tried.found.how for each in graded)),
    }
    return figures | {"executor": sandbox.version, "limits": asdict(limits), "prompt_version": PROMPT_VERSION}, graded


def pass_at_k(k: int, *, n: int, right: int) -> float:
    """1 - C(n - right, k) / C(n, k): the chance that k of the n answers, drawn without putting back, hold a right one.

    Source: Chen et al. 2021, arXiv 2107.03374, equation 1.

    >>> pass_at_k(1, n=10, right=3)
    0.3

    Raises:
        ValueError: k is larger than n, where no estimate is possible.
    """
    if not 1 <= k <= n or not 0 <= right <= n:
        raise ValueError(f"pass@{k} cannot be estimated from {right} right of {n} answers")
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def mean_pass_at_k(right: Sequence[int], *, n: int, k: int) -> tuple[float, float]:
    """The mean over problems and its standard error.

    It is what a bootstrap over the problems tends to with many draws: the spread of the values over the root of their
    number.
    """
    values = [pass_at_k(k, n=n, right=each) for each in right]
    return fmean(values), pstdev(values) / math.sqrt(len(values))
