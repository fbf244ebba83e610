"""A model's programs against the tests of programming problems: pass@1, pass@k, and how the failures ended."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, pstdev
from typing import Any

from sftplay.config.data import SandboxConfig
from sftplay.data.load_problems import LIMITS, collect_reward_columns
from sftplay.data.problem import PROMPT_VERSION, Problem
from sftplay.errors import RunError
from sftplay.reward.code_rewards import Tried, read_limits, try_programs
from sftplay.sandbox.boxes.job import Limits
from sftplay.sandbox.pool import Sandbox


@dataclass(frozen=True, slots=True)
class Graded:
    """One answer to one problem."""

    problem: Problem
    answer: str
    tried: Tried

    def as_json(self) -> dict[str, Any]:
        """Return a line of eval/code-N.jsonl."""
        tried = self.tried
        return {"task_id": self.problem.task_id, "answer": self.answer, "passed": tried.passed, **tried.as_json()}


def measuring_limits(config: SandboxConfig) -> Limits:
    """Return the limits of what is measured: LIMITS, or those of the config where it gives a program more."""
    given, names = read_limits(config), ("timeout_s", "test_timeout_s", "memory_bytes")
    return replace(LIMITS, **{name: max(getattr(LIMITS, name), getattr(given, name)) for name in names})


def evaluate_code(
    problems: Sequence[Problem],
    answers: Sequence[str],
    *,
    ks: Sequence[int] = (1,),
    sandbox: Sandbox,
    limits: Limits = LIMITS,
) -> tuple[dict[str, Any], list[Graded]]:
    """Grade the answers, all those to a problem one after the other; return the figures, and every answer graded.

    The figures are `pass@k` and its standard error over the problems (`stderr` for the first k, else `stderr@k`), and
    counts by status. Raise RunError where the sandbox failed for more than 5 % of the answers: the figures would say
    nothing.
    """
    n = len(answers) // len(problems)
    asked = [problem for problem in problems for _ in range(n)]
    columns: dict[str, Any] = collect_reward_columns(asked)
    tried = try_programs(answers, sandbox=sandbox, limits=limits, **columns)
    graded = [Graded(*row) for row in zip(asked, answers, tried, strict=True)]
    statuses = Counter(answer.tried.status for answer in graded)
    if statuses["infra"] > 0.05 * len(graded):
        what = f"the sandbox failed for {statuses['infra']:,} of {len(graded):,} programs"
        raise RunError(what, where=sandbox.executor, fix="`make sandbox ARGS=--self-test` says what is wrong with it")
    right = [sum(answer.tried.passed for answer in graded[at : at + n]) for at in range(0, len(graded), n)]
    figures: dict[str, Any] = {"n": len(problems), "samples": n, "k": list(ks)}
    for k in ks:
        figures[f"pass@{k}"], figures["stderr" if k == ks[0] else f"stderr@{k}"] = mean_pass_at_k(right, n=n, k=k)
    figures |= {
        "statuses": dict(sorted(statuses.items())),
        "found": dict(Counter(answer.tried.found.how for answer in graded)),
    }
    return figures | {"executor": sandbox.version, "limits": asdict(limits), "prompt_version": PROMPT_VERSION}, graded


def pass_at_k(k: int, *, n: int, right: int) -> float:
    """Return 1 - C(n - right, k) / C(n, k): the chance that k of the n answers, sampled without replacement, hold a
    right one (Chen et al. 2021, arXiv 2107.03374, equation 1).

    >>> pass_at_k(1, n=10, right=3)
    0.3

    Raise ValueError where k is larger than n, where no estimate is possible.
    """
    if not 1 <= k <= n or not 0 <= right <= n:
        raise ValueError(f"pass@{k} cannot be estimated from {right} right of {n} answers")
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def mean_pass_at_k(right: Sequence[int], *, n: int, k: int) -> tuple[float, float]:
    """Return the mean over problems and its standard error.

    It is what a bootstrap over the problems tends to with many draws: the spread of the values over the root of their
    number.
    """
    values = [pass_at_k(k, n=n, right=count) for count in right]
    return fmean(values), pstdev(values) / math.sqrt(len(values))
