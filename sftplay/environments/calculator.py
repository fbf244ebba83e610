"""A calculator for models: it reads an expression by Python's grammar, walks over its tree, and counts exactly.

Nothing is executed. An expression's length, the size of every number in it and with them the time are bounded, so that
`9**9**9` costs no more than `1+1`.
"""

from __future__ import annotations

import ast
import math
import operator
import warnings
from collections.abc import Callable
from decimal import Context, Decimal
from fractions import Fraction
from typing import Any

MOST_CHARACTERS = 300
MOST_BITS = 2_200
"""Of a numerator or denominator: what a float can hold fits, and the square of it."""

SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "^": "**", "²": "**2", "³": "**3", "=": " "})
"""What models write for the operators of Python."""

CONSTANTS = {"pi": Fraction(repr(math.pi)), "e": Fraction(repr(math.e))}


def _divide(left: Fraction, right: Fraction, how: Callable[[Any, Any], Any] = operator.truediv) -> Fraction:
    if right == 0:
        raise ValueError("division by zero")
    return Fraction(how(left, right))


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator == 1:
        size = max(base.numerator.bit_length(), base.denominator.bit_length())
        if size * abs(exponent.numerator) > 2 * MOST_BITS and abs(base) not in (0, 1):
            raise ValueError("the number is too large")
        if base == 0 and exponent < 0:
            raise ValueError("division by zero")
        return Fraction(base ** int(exponent))
    if base < 0:
        raise ValueError("a root of a negative number")
    return _root(base) if exponent == Fraction(1, 2) else _from_float(float(base) ** float(exponent))


def _root(value: Fraction) -> Fraction:
    if value < 0:
        raise ValueError("a root of a negative number")
    exact = Fraction(math.isqrt(value.numerator), math.isqrt(value.denominator))
    return exact if exact * exact == value else _from_float(math.sqrt(value))


def _from_float(value: float) -> Fraction:
    if not math.isfinite(value):
        raise ValueError("the number is too large")
    return Fraction(repr(value))


def _by_float(function: Callable[[float], float]) -> Callable[[Fraction], Fraction]:
    return lambda value: _from_float(function(float(value)))


OPERATORS: dict[type, Callable[..., Fraction]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: _divide, ast.Pow: _power,
    ast.FloorDiv: lambda left, right: _divide(left, right, operator.floordiv),
    ast.Mod: lambda left, right: _divide(left, right, operator.mod),
    ast.USub: operator.neg, ast.UAdd: operator.pos,
}  # fmt: skip

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs, "ceil": math.ceil, "floor": math.floor, "max": max, "min": min, "sqrt": _root, "round": round,
    "cos": _by_float(math.cos), "exp": _by_float(math.exp), "log": _by_float(math.log), "sin": _by_float(math.sin),
    "tan": _by_float(math.tan),
}  # fmt: skip


def calculator(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: Numbers, + - * / // % **, brackets, sqrt, abs, round, min, max, log, exp, pi.
    """
    try:
        if len(expression) > MOST_CHARACTERS:
            raise ValueError(f"the expression has more than {MOST_CHARACTERS} characters")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd numbers, such as 1if
            tree = ast.parse(expression.translate(SIGNS).strip(), mode="eval")
        return write_number(_compute(tree.body))
    except (SyntaxError, RecursionError, MemoryError):
        return "error: this is no arithmetic expression"
    except (ValueError, ArithmeticError, TypeError) as error:
        return f"error: {error}"


def _compute(node: ast.expr) -> Fraction:
    """Return the value of a part of an expression. Raise ValueError where it is not arithmetic, or too large."""
    number = node.value if isinstance(node, ast.Constant) else None
    if isinstance(number, int | float) and not isinstance(number, bool):
        value = _from_float(number) if isinstance(number, float) else Fraction(number)
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        value = OPERATORS[type(node.op)](_compute(node.left), _compute(node.right))
    elif isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        value = OPERATORS[type(node.op)](_compute(node.operand))
    elif isinstance(node, ast.Name) and node.id in CONSTANTS:
        value = CONSTANTS[node.id]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS:
        if node.keywords or not node.args:
            raise ValueError(f"{node.func.id} takes numbers")
        arguments: list[Any] = [_compute(argument) for argument in node.args]
        if node.func.id == "round" and len(arguments) == 2:
            arguments[1] = max(-MOST_CHARACTERS, min(MOST_CHARACTERS, int(arguments[1])))
        try:
            value = Fraction(FUNCTIONS[node.func.id](*arguments))
        except TypeError:
            numbers = "1 number" if len(arguments) == 1 else f"{len(arguments)} numbers"
            raise ValueError(f"{node.func.id} does not take {numbers}") from None
    else:
        raise ValueError(f"cannot compute {ast.unparse(node)[:40]!r}")
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MOST_BITS:
        raise ValueError("the number is too large")
    return value


def write_number(value: Fraction) -> str:
    """Write a whole number with all its digits, another one with at most 12, or one more than its whole part has.

    >>> write_number(Fraction(7, 2)), write_number(Fraction(1, 3)), write_number(Fraction(10**30))
    ('3.5', '0.333333333333', '1000000000000000000000000000000')
    """
    if value.denominator == 1:
        return str(value.numerator)
    context = Context(prec=max(12, len(str(abs(int(value)))) + 1))  # a whole part that is cut off would look whole
    number = context.normalize(context.divide(Decimal(value.numerator), Decimal(value.denominator)))
    return f"{number:f}" if -12 < number.adjusted() < 20 else str(number)
