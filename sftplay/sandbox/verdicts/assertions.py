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
    """The strongest way to judge that the tests of a job allow."""
    free = free_names([*job.tests, job.setup])
    # A test may use `sys` because the solution that it was written for imports it.
    modules = [name for name in free if name in sys.stdlib_module_names and _is_module(name, job.tests)]
    own = {job.entry_point} if job.entry_point else set()
    functions = tuple(sorted({*free, *own} - {*modules}))
    if not functions:  # the program's function has the name of one of Python's own, as in `assert sum(1, 2) == 3`
        functions = tuple(sorted({name for test in job.tests if (name := _outermost_call(test))}))
    comparisons = tuple(read_comparison(test, functions) for test in job.tests)
    if not job.tests:
        mode: Mode = "none"
    elif all(comparisons):
        mode = "pair"
    elif any(_is_class_name(name) for name in functions) or any(_looks_inside(each, functions) for each in job.tests):
        mode = "in_process"
    else:
        mode = "proxy"
    if mode == "in_process":
        comparisons = (None,) * len(job.tests)
    return Plan(mode, comparisons, functions, "".join(f"import {name}\n" for name in modules) + job.setup)


def _outermost_call(test: str) -> str:
    """`f` of `assert f(1) == 2`; empty where the test is anything else."""
    for node in ast.walk(parse(test)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            return node.func.id
    return ""


def _looks_inside(test: str, functions: Sequence[str]) -> bool:
    """True when the test reads an attribute, which no plain value has, of what the program gave: `f(2).head`."""

    def is_given(node: ast.expr) -> bool:
        return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in functions

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
    """The test as a comparison of what one of the functions gives; None where it is anything else."""
    body = parse(test).body
    if len(body) != 1 or not isinstance(body[0], ast.Assert):
        return None
    asserted = body[0].test
    if isinstance(asserted, ast.Compare) and len(asserted.ops) == 1:
        read = _read_relation(asserted)
    else:
        is_negated = isinstance(asserted, ast.UnaryOp) and isinstance(asserted.op, ast.Not)
        inner = asserted.operand if isinstance(asserted, ast.UnaryOp) and is_negated else asserted
        read = _read_call(inner, relation="false" if is_negated else "true")
    return read if read and read.name in functions else None


def _read_relation(asserted: ast.Compare) -> Comparison | None:
    operator, other = asserted.ops[0], asserted.comparators[0]
    if isinstance(operator, ast.Is) and not (isinstance(other, ast.Constant) and other.value is None):
        return None
    if not isinstance(operator, (ast.Eq, ast.NotEq, ast.Is)):
        return None
    try:
        expected = ast.literal_eval(other)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    if not _is_plain(expected):
        return None
    relation: Relation = "unequal" if isinstance(operator, ast.NotEq) else "equal"
    return _read_call(asserted.left, relation=relation, expected=expected)


def _read_call(node: ast.expr, *, relation: Relation, expected: Any = None) -> Comparison | None:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return None
    if any(keyword.arg is None for keyword in node.keywords):
        return None
    try:
        args = [ast.literal_eval(each) for each in node.args]
        named = {str(each.arg): ast.literal_eval(each.value) for each in node.keywords}
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    if not all(map(_is_plain, [*args, *named.values()])):
        return None
    return Comparison(node.func.id, args, named, relation, expected)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, [*value.keys(), *value.values()]))
    if isinstance(value, (list, tuple, set)):
        return all(map(_is_plain, value))
    return isinstance(value, PLAIN)


def free_names(sources: Sequence[str]) -> tuple[str, ...]:
    """Names that the sources use and none of them defines, sorted, without Python's own."""
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


def _is_class_name(name: str) -> bool:
    """Python's convention. What the program makes of the name is not asked: it would choose the weaker way."""
    return name.lstrip("_")[:1].isupper()
