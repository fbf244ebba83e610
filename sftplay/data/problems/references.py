"""Problems whose own solution passes its tests here: the others can teach and measure nothing.

A reference may need a newer Python, a library that no box has, or more time than there is.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from sftplay import log
from sftplay.data.cache import ensure_folder, fingerprint
from sftplay.data.problems.problem import Problem
from sftplay.errors import DataError, RunError
from sftplay.places import CACHE, cache_root
from sftplay.sandbox.pool import Sandbox
from sftplay.sandbox.verdicts.job import Job, Limits, Status, Verdict
from sftplay.sandbox.verdicts.judge import SETUP_FAILED

LIMITS = Limits(timeout_s=20.0, test_timeout_s=5.0)
"""Some reference solutions of MBPP need two seconds for a test on a busy machine."""

FAILED = "failed.json"

TIMEOUT: Status = "timeout"

NAMED = 5
"""Problems of which a log line says why they are left out."""


class _TooSlowNow(Exception):
    """Carries verdicts that must not be kept."""

    def __init__(self, failed: dict[str, str]) -> None:
        super().__init__()
        self.failed = failed


def sound_problems(
    problems: Sequence[Problem], sandbox: Sandbox, *, limits: Limits = LIMITS, fate: str = "is left out"
) -> tuple[list[Problem], dict[str, str]]:
    """The problems whose reference passes every test, and of each other the status of its reference, by task id.

    What becomes of the others is said, in the words of `fate`. References run once for the same problems, limits and
    executor; the verdicts are cached, unless one of them is that a reference takes too long: the machine may have been
    busy.

    Raises:
        RunError: the sandbox failed, so that nothing is known of a reference.
        DataError: a test or setup is no Python; or no problem is left.
    """
    key = fingerprint({
        "problems": [[each.task_id, each.reference, each.tests, each.setup, each.entry_point] for each in problems],
        "limits": asdict(limits),
        "executor": sandbox.version,
    })  # fmt: skip

    def make(unfinished: Path) -> None:
        log.status(f"running {len(problems):,} reference solutions", "data")
        failed = _failures(problems, sandbox, limits=limits)
        if any(why.startswith(TIMEOUT) for why in failed.values()):
            raise _TooSlowNow(failed)
        (unfinished / FAILED).write_text(json.dumps(failed), encoding="utf-8")

    try:
        folder = ensure_folder(cache_root() / "references" / key, make, setting=f"the variable {CACHE}")
        failed = json.loads((folder / FAILED).read_text(encoding="utf-8"))
    except _TooSlowNow as slow:
        failed = slow.failed
    for task_id, why in list(failed.items())[:NAMED]:
        log.say(f"problem {task_id} {fate}, its own solution does not pass: {why}", "data")
    if failed:
        log.say(f"the own solutions of {len(failed):,} of {len(problems):,} problems do not pass", "data")
    sound = [each for each in problems if each.task_id not in failed]
    if not sound:
        fix = "look at one by `make sandbox`, or name another file"
        raise DataError(f"none of {len(problems):,} reference solutions passes its tests", where="problems", fix=fix)
    return sound, failed


def _failures(problems: Sequence[Problem], sandbox: Sandbox, *, limits: Limits) -> dict[str, str]:
    """Task id -> why its reference fails. One that fails beside others is tried once more alone: they took its time."""
    jobs = [_job(each, limits) for each in problems]
    verdicts = sandbox.run(jobs)
    failed = {}
    for problem, job, verdict in zip(problems, jobs, verdicts, strict=True):
        again = verdict if verdict.status in ("ok", "syntax") else sandbox.run_again(job)
        if again.status == "infra" and not again.stderr.startswith(SETUP_FAILED):
            fix = "`make sandbox ARGS=--self-test` says what is wrong with it"
            raise RunError(f"the sandbox failed ({again.stderr})", where=sandbox.executor, fix=fix)
        if not _passes(again):
            status = "" if again.status == "infra" else again.status
            failed[problem.task_id] = f"{status} {again.stderr}".strip()
    return failed


def _job(problem: Problem, limits: Limits) -> Job:
    try:
        return Job(
            code=problem.reference, tests=problem.tests, setup=problem.setup, entry_point=problem.entry_point or None,
            limits=limits,
        )  # fmt: skip
    except DataError as error:
        raise DataError(error.what, where=f"{problem.task_id}, {error.where}", fix=error.fix) from error


def _passes(verdict: Verdict) -> bool:
    return verdict.status == "ok" and verdict.passed == verdict.total > 0
