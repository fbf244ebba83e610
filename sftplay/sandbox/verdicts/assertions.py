"""How a test is judged without trusting the program: which calls it makes, and what it expects of them.

It parses tests, which are trusted. It never parses the program.
"""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sftplay.sandbox.inside.plain import is_same, is_true
from sftplay.sandbox.verdicts.job import Job, Mode, parse

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
