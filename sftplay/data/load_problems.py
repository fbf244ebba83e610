"""Load problems in their published layouts, with their reference answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal

from sftplay import log
from sftplay.data.cache import ensure_folder, fingerprint
from sftplay.data.problem import Problem, find_split, reward_columns, to_problem
from sftplay.data.read import is_hub_name, read_rows
from sftplay.data.records import Refused, Source
from sftplay.errors import DataError, RunError, nearest_names
from sftplay.places import CACHE, cache_root
from sftplay.sandbox.boxes.job import Job, Limits
from sftplay.sandbox.boxes.judge import SETUP_FAILED
from sftplay.sandbox.pool import Sandbox

LIMITS = Limits(timeout_s=20.0, test_timeout_s=5.0)
"""Some reference solutions of MBPP need two seconds for a test on a busy machine."""

FAILED = "failed.json"


class _TooSlowNow(Exception):
    """Signal that the verdicts, its argument, must not be kept."""


def sound_problems(
    problems: Sequence[Problem], sandbox: Sandbox, *, limits: Limits = LIMITS, outcome: str = "is left out"
) -> tuple[list[Problem], dict[str, str]]:
    """Return the problems with a reference that passes every test, and for each other one the reason, by task id.

    The others are logged, with `outcome` for what happens to them. References run once for the same problems, limits
    and executor; the verdicts are cached, unless a reference took too long: the machine may have been busy.
    Raise RunError where the sandbox failed, so nothing is known about a reference; DataError where a test or setup is
    no Python; or no problem is left.
    """
    facts = [[p.task_id, p.reference, p.tests, p.setup, p.entry_point] for p in problems]
    key = fingerprint({"problems": facts, "limits": asdict(limits), "executor": sandbox.version})

    def write_verdicts(unfinished: Path) -> None:
        log.status(f"running {len(problems):,} reference solutions", "data")
        failed = _find_failures(problems, sandbox, limits=limits)
        if any(why.startswith("timeout") for why in failed.values()):
            raise _TooSlowNow(failed)
        (unfinished / FAILED).write_text(json.dumps(failed), encoding="utf-8")

    try:
        folder = ensure_folder(cache_root() / "references" / key, write_verdicts, setting=f"the variable {CACHE}")
        failed = json.loads((folder / FAILED).read_text(encoding="utf-8"))
    except _TooSlowNow as slow:
        (failed,) = slow.args
    for task_id, why in list(failed.items())[:5]:
        log.say(f"problem {task_id} {outcome}: its reference solution does not pass: {why}", "data")
    if failed:
        log.say(f"the reference solutions of {len(failed):,} of {len(problems):,} problems do not pass", "data")
    sound = [problem for problem in problems if problem.task_id not in failed]
    if not sound:
        fix = "look at one by `make sandbox`, or name another file"
        raise DataError(f"none of {len(problems):,} reference solutions passes its tests", where="problems", fix=fix)
    return sound, failed


def _find_failures(problems: Sequence[Problem], sandbox: Sandbox, *, limits: Limits) -> dict[str, str]:
    """Return task id -> why its reference fails. One that fails is run again alone: the others may have slowed it."""
    jobs = []
    for problem in problems:
        code, name = problem.reference, problem.entry_point or None
        try:
            jobs.append(Job(code=code, tests=problem.tests, setup=problem.setup, entry_point=name, limits=limits))
        except DataError as error:
            raise DataError(error.what, where=f"{problem.task_id}, {error.where}", fix=error.fix) from error
    failed = {}
    for problem, job, verdict in zip(problems, jobs, sandbox.run(jobs), strict=True):
        again = verdict if verdict.status in ("ok", "syntax") else sandbox.run_again(job)
        if again.status == "infra" and not again.stderr.startswith(SETUP_FAILED):
            fix = "`make sandbox ARGS=--self-test` says what is wrong with it"
            raise RunError(f"the sandbox failed ({again.stderr})", where=sandbox.executor, fix=fix)
        if not (again.status == "ok" and again.passed == again.total > 0):
            status = "" if again.status == "infra" else again.status
            failed[problem.task_id] = f"{status} {again.stderr}".strip()
    return failed


@dataclass(frozen=True, slots=True)
class Published:
    """A data set of problems."""

    files: tuple[str, ...]  # names of the file that its authors publish
    hub: str
    subset: str | None
    splits: tuple[str, ...]  # all of them: the ids decide which problems are for testing


MBPP_PARTS = ("prompt", "test", "validation", "train")

PUBLISHED = {
    "mbpp": Published(("mbpp.jsonl",), "google-research-datasets/mbpp", "full", MBPP_PARTS),
    "mbpp-sanitized": Published(("sanitized-mbpp.json",), "google-research-datasets/mbpp", "sanitized", MBPP_PARTS),
    "humaneval": Published(("HumanEval.jsonl", "HumanEval.jsonl.gz"), "openai/openai_humaneval", None, ("test",)),
}


def _read_rows(named: str) -> Iterator[tuple[Source, dict[str, Any] | Refused]]:
    """Yield the rows of a file, or of a data set of PUBLISHED: from its local file, else from the hub."""
    known, file = PUBLISHED.get(named), _find_local_file(named)
    if known is None or file or Path(named).exists():
        path = str(file or named)
        if not Path(path).exists() and not is_hub_name(path):
            near = nearest_names(path, PUBLISHED)
            fix = f"did you mean {near[0]}?" if near else f"name a file, or one of {', '.join(PUBLISHED)}"
            raise DataError("there is no such file or data set", where=f"DATA {path}", fix=fix, nearest=near)
        yield from read_rows(path)
        return
    from sftplay.data.tables import read_hub_rows

    try:
        yield from read_hub_rows(known.hub, known.subset, splits=known.splits)
    except DataError as error:
        fix = f"put {known.files[0]} into data/, or name a file: DATA=path/{known.files[0]}"
        for other in (name for name in PUBLISHED if name.startswith(f"{named}-") and _find_local_file(name)):
            fix += f"; {_find_local_file(other)} is there: DATA={other}"
        raise DataError(error.what, where=f"{named} ({known.hub} on the hub)", fix=fix) from error


def _find_local_file(name: str) -> Path | None:
    """Find the file of a data set of PUBLISHED on this machine; None where there is none, or no such data set."""
    files = PUBLISHED[name].files if name in PUBLISHED else ()
    folders = [Path(folder.format(name=name.removesuffix("-sanitized"))) for folder in ("data/{name}", "data", ".")]
    return next((folder / file for folder in folders for file in files if (folder / file).is_file()), None)


Split = Literal["all", "prompt", "test", "validation", "train"]


def load_problems(path: str, split: Split = "all") -> list[Problem]:
    """Return the problems of a file or of a data set of `PUBLISHED`, in order; of equal texts only the first.
    Raise DataError where the file cannot be read, a row is no problem, or nothing of the split is there.
    """
    problems: list[Problem] = []
    seen: set[str] = set()
    for source, row in _read_rows(path):
        if isinstance(row, Refused):
            raise DataError(row.reason, where=str(source), fix="mend the row, or remove it")
        try:
            problem = to_problem(row)
        except DataError as error:
            raise DataError(error.what, where=str(source), fix=error.fix) from error
        words = " ".join(problem.text.lower().split())
        if words not in seen and (split == "all" or find_split(problem.task_id) == split):
            problems.append(problem)
        seen.add(words)
    if not problems:
        raise DataError(f"has no problem of the split {split!r}", where=path, fix="name another split, or another file")
    return problems


def sample_subset(problems: Sequence[Problem], limit: int | None, *, seed: int) -> list[Problem]:
    """Sample at most `limit` of the problems by `seed`, in their order; the first ones would be like each other."""
    if limit is None or limit >= len(problems):
        return list(problems)
    return [problems[at] for at in sorted(Random(seed).sample(range(len(problems)), limit))]


def collect_reward_columns(problems: Sequence[Problem]) -> dict[str, list[Any]]:
    """Collect the problems into the columns that code rewards read."""
    rows = [reward_columns(problem) for problem in problems]
    return {name: [row[name] for row in rows] for name in rows[0]}
