"""One job from its first box to its verdict."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sftplay.sandbox.verdicts.assertions import Comparison, Plan, plan_tests
from sftplay.sandbox.verdicts.box import Box, Lost
from sftplay.sandbox.verdicts.job import Job, Status, Verdict

SETUP_S = 60.0
"""For trusted statements, such as imports."""

MOST_LOST = 3
"""Boxes that one job may lose. The tests after that end as the last one did, without being run."""

SETUP_FAILED = "the setup of the job"
"""With this begins what an `infra` verdict says where the job's own statements are at fault, and not the machine."""

STATUSES = ("ok", "wrong", "runtime", "syntax", "memory", "output")
"""What the program's box may say once the program has run. It would say `infra` to be spared a 0, and `objects` to be
judged more weakly. `timeout`, `killed` and `tampered` are seen from outside."""


class NeedsObjects(Exception):
    """A test hands the program an object: the tests must share the program's process."""


def judge(job: Job, open_box: Callable[[], Box], *, executor: str) -> Verdict:
    """Judge a job. `open_box` gives a new box that stands, or raises `Lost`."""
    started = time.monotonic()
    plan = plan_tests(job)
    try:
        per_test, text = JobRunner(job, plan=plan, open_box=open_box).run()
    except NeedsObjects:
        plan = replace(plan, mode="in_process", comparisons=(None,) * len(job.tests))
        per_test, text = JobRunner(job, plan=plan, open_box=open_box).run()
    # `infra` and `tampered` where any test has it; else what the first test that failed has.
    worst: tuple[Status, ...] = ("infra", "tampered")
    ranked = [*(status for status in worst if status in per_test), *per_test]
    return Verdict(
        status=next((status for status in ranked if status != "ok"), "ok"),
        per_test=tuple(per_test) if job.tests else (), total=len(job.tests),
        passed=per_test.count("ok") if job.tests else 0, seconds=time.monotonic() - started,
        stderr=text.encode("utf-8", "replace").decode(),  # without surrogates: every file can take it
        mode=plan.mode, executor=executor,
    )  # fmt: skip


class JobRunner:
    """The boxes of one job, and what is left of its time."""

    def __init__(self, job: Job, *, plan: Plan, open_box: Callable[[], Box]) -> None:
        self.job, self.plan, self._open_box = job, plan, open_box
        self.left_s = job.limits.timeout_s
        self.text = ""
        self._candidate: Box | None = None
        self._tester: Box | None = None
        self._n_lost = 0

    def run(self) -> tuple[list[Status], str]:
        """Find the status of each test, or of the program alone where there is none; and what to show of it."""
        per_test: list[Status] = []
        try:
            for number in range(max(1, len(self.job.tests))):
                if self._n_lost >= MOST_LOST:
                    per_test.append(per_test[-1])
                elif number and self.left_s <= 0:
                    per_test.append("timeout")
                else:
                    per_test.append(self._run_in_turn(number))
            return per_test, self.text or self._printed()
        finally:
            self._close()

    def _printed(self) -> str:
        return self._candidate.shown() if self._candidate else ""

    def _run_in_turn(self, number: int) -> Status:
        try:
            if self._candidate is None and (status := self._note(self._load())) != "ok":
                self._n_lost = MOST_LOST  # it would not load another time either
                return status
            if not self.job.tests:
                return "ok"
            comparison = self.plan.comparisons[number]
            return self._compare(comparison) if comparison else self._run_test(number)
        except Lost as lost:
            self._n_lost += 1
            self.text = self.text or self._printed() or str(lost)
            self._close()
            return lost.status

    def _note(self, answer: dict[str, Any]) -> Status:
        """Return the answer's status; keep the first failure's text."""
        status = answer.get("status")
        if status not in STATUSES:
            raise Lost("tampered", "the answer has no proper status")
        if status != "ok":
            text = answer.get("text")
            self.text = self.text or (text[-2_000:] if isinstance(text, str) else "")
        return status

    def _ask(self, box: Box, order: str, *, within_s: float, **parts: Any) -> dict[str, Any]:
        """Ask, on the job's time."""
        asked = time.monotonic()
        try:
            return box.ask(order, **parts, within_s=min(within_s, self.left_s))
        finally:
            self.left_s -= time.monotonic() - asked

    def _load(self) -> dict[str, Any]:
        """Open the program's box, with the program in it."""
        self._candidate = self._open_box()
        prepared = {"status": "ok"}
        if self.job.setup:
            prepared = self._candidate.ask("prepare", setup=self.job.setup, within_s=SETUP_S)
        if prepared["status"] == "infra":
            raise Lost("infra", f"{SETUP_FAILED}: {prepared.get('text')}")
        late_setup = self.job.setup if prepared["status"] == "later" else ""
        return self._ask(self._candidate, "load", code=self.job.code, late_setup=late_setup, within_s=self.left_s)

    def _compare(self, comparison: Comparison) -> Status:
        """Ask the program for a value; it never sees what is expected."""
        assert self._candidate is not None
        answer = self._ask(
            self._candidate, "call", name=comparison.name, args=comparison.args, named=comparison.named,
            is_encoded=False, within_s=self.job.limits.test_timeout_s,
        )  # fmt: skip
        if (status := self._note(answer)) != "ok":
            return status if status in ("memory", "output") else "runtime"
        if comparison.holds(answer.get("value")):
            return "ok"
        self.text = self.text or "another value than the test expects"
        return "wrong"

    def _run_test(self, number: int) -> Status:
        """Run the test in a box: the program's or another."""
        assert self._candidate is not None
        source, within_s = self.job.tests[number], self.job.limits.test_timeout_s
        if self.plan.mode == "in_process":
            return self._note(self._ask(self._candidate, "test", source=source, within_s=within_s))
        if self._tester is None:
            self._tester = self._open_box()
            bound = self._tester.ask(
                "bind", functions=list(self.plan.functions), setup=self.plan.setup, within_s=SETUP_S
            )
            if bound.get("status") != "ok":
                raise Lost("infra", f"the setup of the tests: {bound.get('text', 'it calls the program')}")
        asked = time.monotonic()
        try:
            return self._note(self._converse(source, until=asked + min(within_s, self.left_s)))
        finally:
            self.left_s -= time.monotonic() - asked

    def _converse(self, source: str, *, until: float) -> dict[str, Any]:
        """Run the test; each call that it makes of the program goes to the program's box, and the value back."""
        assert self._candidate is not None
        assert self._tester is not None
        tester = self._tester
        nonce = "test"  # the tester runs no code of the program
        tester.send(("test", nonce, {"source": source}), until)
        while True:
            answer = tester.read(nonce, until)
            if answer.get("status") == "objects":
                raise NeedsObjects
            if "status" in answer:
                return answer
            left_s = until - time.monotonic()
            value = self._candidate.ask(
                "call", name=answer["name"], args=answer["args"], named=answer["named"], is_encoded=True,
                within_s=left_s,
            )  # fmt: skip
            # The stand-in reads these fields, and nothing else.
            lists = value.get("changed"), value.get("args")
            is_whole = all(isinstance(found, list) and len(found) == len(answer["args"]) for found in lists)
            if value.get("status") == "ok" and (not is_whole or "value" not in value):
                raise Lost("tampered", "the answer has no value")
            if value.get("status") not in STATUSES:
                raise Lost("tampered", "the answer has no proper status")
            try:
                tester.send((value,), until)
            except ValueError as error:  # too deep for marshal
                raise Lost("tampered", "the answer is nested too deep") from error

    def _close(self) -> None:
        for box in (self._candidate, self._tester):
            if box is not None:
                box.close()
        self._candidate = self._tester = None
