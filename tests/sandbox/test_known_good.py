"""The reference solutions of MBPP (sanitized) and HumanEval pass, and a broken test breaks exactly itself."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from sftplay.sandbox.boxes.job import Job, Limits
from sftplay.sandbox.pool import SAFE, Sandbox, find_problem

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
MBPP, HUMANEVAL = DATA / "mbpp" / "sanitized-mbpp.json", DATA / "humaneval" / "HumanEval.jsonl"

PATIENT = Limits(timeout_s=60, test_timeout_s=30)
"""The machine of these tests may be busy; what is asked here is whether solutions are right, not how fast they are."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MBPP.exists() or not HUMANEVAL.exists(), reason=f"needs MBPP and HumanEval in {DATA}"),
    pytest.mark.skipif(all(map(find_problem, SAFE)), reason="needs bubblewrap or sandlock"),
]


def mbpp() -> list[Job]:
    return [
        Job(code=row["code"], tests=tuple(row["test_list"]), setup="\n".join(row["test_imports"]), limits=PATIENT)
        for row in json.loads(MBPP.read_text())
    ]


def humaneval() -> list[Job]:
    rows = map(json.loads, HUMANEVAL.read_text().splitlines())
    return [
        Job(
            code=row["prompt"] + row["canonical_solution"], tests=(f"{row['test']}\ncheck({row['entry_point']})",),
            entry_point=row["entry_point"], limits=PATIENT,
        )
        for row in rows
    ]  # fmt: skip


def with_a_broken_test(job: Job, which: int) -> Job:
    tests = list(job.tests)
    tests[which] = f"assert not ({tests[which].removeprefix('assert ')})"
    return Job(code=job.code, tests=tuple(tests), setup=job.setup, limits=job.limits)


def test_every_reference_solution_passes_and_a_broken_test_fails_alone():
    draw = random.Random(0)
    known = [*mbpp(), *humaneval()]
    assert len(known) == 427 + 164
    plain = [job for job in mbpp() if len(job.tests) == 3 and all(test.startswith("assert ") for test in job.tests)]
    wrong = [(job, draw.randrange(3)) for job in draw.sample(plain, 50)]
    with Sandbox() as sandbox:
        verdicts = sandbox.run([*known, *(with_a_broken_test(job, which) for job, which in wrong)])
    assert [(job.code, verdict) for job, verdict in zip(known, verdicts, strict=False) if verdict.status != "ok"] == []
    for (_, which), verdict in zip(wrong, verdicts[len(known) :], strict=True):
        assert (verdict.status, verdict.passed, verdict.total, verdict.per_test[which]) == ("wrong", 2, 3, "wrong")


@pytest.mark.skipif(bool(find_problem("bwrap", is_warm=True)), reason="needs bubblewrap, and user namespaces in it")
def test_programs_are_judged_alike_by_new_boxes_and_by_one_that_waits():
    jobs = draw_jobs(60)
    with Sandbox("bwrap") as warm, Sandbox("bwrap", is_warm=False) as fresh:
        assert judged(warm, jobs) == judged(fresh, jobs)


def draw_jobs(count: int) -> list[Job]:
    """Good and broken programs, mixed."""
    draw = random.Random(1)
    jobs = mbpp()
    broken = [Job(code=job.code.replace("+", "-"), tests=job.tests, setup=job.setup, limits=PATIENT) for job in jobs]
    raising = [Job(code=job.code.replace("(", "((", 1), tests=job.tests, setup=job.setup) for job in jobs]
    return draw.sample([*jobs, *broken, *raising], count)


def judged(sandbox: Sandbox, jobs: list[Job]) -> list[tuple[object, ...]]:
    return [(verdict.status, verdict.per_test, verdict.mode, verdict.stderr) for verdict in sandbox.run(jobs)]
