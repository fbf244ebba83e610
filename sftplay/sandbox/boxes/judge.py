"""Verdicts: the assertions of a program, and what became of each."""

from __future__ import annotations

import ast
import builtins
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from sftplay.sandbox.boxes.box import Box, Lost
from sftplay.sandbox.boxes.job import Job, Mode, Status, Verdict, parse
from sftplay.sandbox.inside.plain import is_same, is_true

if TYPE_CHECKING:
    from sftplay.sandbox.boxes.executors import Executor

Relation = Literal["equal", "unequal", "true", "false"]

PLAIN_ATTRIBUTES = frozenset(
    name for kind in (str, bytearray, complex, float, list, tuple, set, dict, range) for name in dir(kind)
)  # fmt: skip
"""What a stand-in's value can be asked for where the tests have a box of their own."""

PLAIN = (bool, int, float, complex, str, bytes, list, tuple, set, dict, type(None))


@dataclass(frozen=True, slots=True)
class Comparison:
    """`assert f(literals) == literal`, or `!=`, or `assert f(literals)`, or `assert not f(literals)`."""

    name: str
    args: list[Any]
    named: dict[str, Any]
    relation: Relation
    expected: Any = None

    def holds(self, structure: Any) -> bool:
        """True when the test passes with this answer of the program, a structure of `inside.plain`."""
        if self.relation in ("true", "false"):
            return is_true(structure) == (self.relation == "true")
        return is_same(structure, self.expected) == (self.relation == "equal")


@dataclass(frozen=True, slots=True)
class Plan:
    """How a job's tests are judged. An entry of `comparisons` is None where the test must run in a box."""

    mode: Mode
    comparisons: tuple[Comparison | None, ...]
    functions: tuple[str, ...]
    """The names that the tests expect of the program."""

    setup: str
    """What runs before the tests, where they have a box of their own."""


def plan_tests(job: Job) -> Plan:
    """Find the strongest way to judge that the tests of a job allow."""
    free = free_names([*job.tests, job.setup])
    # A test may use `sys` because the solution that it was written for imports it.
    modules = [name for name in free if name in sys.stdlib_module_names and _is_module(name, job.tests)]
    named = {job.entry_point} if job.entry_point else set()
    functions = tuple(sorted({*free, *named} - {*modules}))
    if not functions:  # the program's function has the name of one of Python's own, as in `assert sum(1, 2) == 3`
        outermost: list[Any] = [next(filter(_is_named_call, ast.walk(parse(test))), None) for test in job.tests]
        functions = tuple(sorted({call.func.id for call in outermost if call}))
    comparisons = tuple(read_comparison(test, functions) for test in job.tests)
    # Python's convention for classes. What the program makes of a name is not asked: it would choose the weaker way.
    has_class = any(name.lstrip("_")[:1].isupper() for name in functions)
    if not job.tests:
        mode: Mode = "none"
    elif all(comparisons):
        mode = "pair"
    elif has_class or any(_looks_inside(test, functions) for test in job.tests):
        mode = "in_process"
        comparisons = (None,) * len(job.tests)
    else:
        mode = "proxy"
    return Plan(mode, comparisons, functions, "".join(f"import {name}\n" for name in modules) + job.setup)


def _is_named_call(node: Any) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name)


def _looks_inside(test: str, functions: Sequence[str]) -> bool:
    """True when the test reads an attribute, which no plain value has, of what the program gave: `f(2).head`."""

    def is_given(node: Any) -> bool:
        return _is_named_call(node) and node.func.id in functions

    nodes = list(ast.walk(parse(test)))
    assigned = [node for node in nodes if isinstance(node, ast.Assign) and is_given(node.value)]
    names = {target.id for node in assigned for target in node.targets if isinstance(target, ast.Name)}
    return any(
        node.attr not in PLAIN_ATTRIBUTES
        and (is_given(node.value) or (isinstance(node.value, ast.Name) and node.value.id in names))
        for node in nodes
        if isinstance(node, ast.Attribute)
    )


def _is_module(name: str, tests: Sequence[str]) -> bool:
    """True when the tests use the name for its attributes alone."""
    bases = [node.value for test in tests for node in ast.walk(parse(test)) if isinstance(node, ast.Attribute)]
    names = [node for test in tests for node in ast.walk(parse(test)) if isinstance(node, ast.Name)]
    n_bases = sum(isinstance(node, ast.Name) and node.id == name for node in bases)
    return n_bases == sum(node.id == name for node in names)


def read_comparison(test: str, functions: Sequence[str]) -> Comparison | None:
    """Read the test as a comparison of what one of the functions gives; None where it is anything else."""
    body = parse(test).body
    if len(body) != 1 or not isinstance(body[0], ast.Assert):
        return None
    call: Any = body[0].test
    relation: Relation = "true"
    other: ast.expr | None = None
    if isinstance(call, ast.Compare) and len(call.ops) == 1:
        operator, other = call.ops[0], call.comparators[0]
        is_none = isinstance(operator, ast.Is) and isinstance(other, ast.Constant) and other.value is None
        if not is_none and not isinstance(operator, (ast.Eq, ast.NotEq)):
            return None
        relation, call = "unequal" if isinstance(operator, ast.NotEq) else "equal", call.left
    elif isinstance(call, ast.UnaryOp) and isinstance(call.op, ast.Not):
        relation, call = "false", call.operand
    if not _is_named_call(call) or call.func.id not in functions or any(word.arg is None for word in call.keywords):
        return None
    try:
        expected = ast.literal_eval(other) if other else None
        args = [ast.literal_eval(arg) for arg in call.args]
        named = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    is_all_plain = all(map(_is_plain, [expected, *args, *named.values()]))
    return Comparison(call.func.id, args, named, relation, expected) if is_all_plain else None


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, [*value.keys(), *value.values()]))
    if isinstance(value, (list, tuple, set)):
        return all(map(_is_plain, value))
    return isinstance(value, PLAIN)


def free_names(sources: Sequence[str]) -> tuple[str, ...]:
    """Find the names that the sources use and none of them defines, sorted, without Python's own."""
    used: set[str] = set()
    defined: set[str] = set()
    for source in sources:
        for node in ast.walk(parse(source)):
            if isinstance(node, ast.Name):
                (used if isinstance(node.ctx, ast.Load) else defined).add(node.id)
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                defined.add(node.name)
            elif isinstance(node, ast.arg):
                defined.add(node.arg)
            elif isinstance(node, ast.alias):
                defined.add((node.asname or node.name).split(".")[0])
            elif isinstance(node, ast.ExceptHandler) and node.name:
                defined.add(node.name)
    return tuple(sorted(name for name in used - defined if not hasattr(builtins, name)))


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


def judge(job: Job, executor: Executor) -> Verdict:
    started = time.monotonic()
    plan = plan_tests(job)
    try:
        per_test, text = JobRunner(job, plan=plan, executor=executor).run()
    except NeedsObjects:
        plan = replace(plan, mode="in_process", comparisons=(None,) * len(job.tests))
        per_test, text = JobRunner(job, plan=plan, executor=executor).run()
    # `infra` and `tampered` where any test has it; else what the first test that failed has.
    worst: tuple[Status, ...] = ("infra", "tampered")
    ranked = [*(status for status in worst if status in per_test), *per_test]
    return Verdict(
        status=next((status for status in ranked if status != "ok"), "ok"),
        per_test=tuple(per_test) if job.tests else (), total=len(job.tests),
        passed=per_test.count("ok") if job.tests else 0, seconds=time.monotonic() - started,
        stderr=text.encode("utf-8", "replace").decode(),  # without surrogates: every file can take it
        mode=plan.mode, executor=executor.name,
    )  # fmt: skip


class JobRunner:
    """The boxes of one job, and what is left of its time."""

    def __init__(self, job: Job, *, plan: Plan, executor: Executor) -> None:
        self.job, self.plan, self._executor = job, plan, executor
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
        self._candidate = self._executor.open(self.job.limits)
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
            self._tester = self._executor.open(self.job.limits)
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
