"""Whether a hint states the right answer, in whatever form: a number in digits or words, a text, a program.

A number that the problem has itself, or that counts or names a step, is no leak unless it is called the answer.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from contextlib import suppress
from fractions import Fraction
from textwrap import dedent

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(
    rf"(?<![\w.,^\\])(?P<sign>(?<![\w)\]])-|\bminus |\bnegative )?(?<![\w.])"
    rf"(?P<top>{_DIGITS})(?:\s?/\s?(?P<bottom>\d+))?(?P<power>[eE][+-]?\d{{1,2}})?"
    r"(?:cm|mm|km|kg|ml|min|m|g|h|s)?(?![\w]|[.,]\d)",
    re.IGNORECASE,
)
_SMALL = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_TEENS = ("thir", "four", "fif", "six", "seven", "eigh", "nine")
_TENS = ("twen", "thir", "for", "fif", "six", "seven", "eigh", "nine")
_WORDS = {word: n for n, word in enumerate(_SMALL)}
_WORDS |= {f"{word}teen": n for n, word in enumerate(_TEENS, 13)} | {
    f"{word}ty": 10 * n for n, word in enumerate(_TENS, 2)
}
_SCALES = {"hundred": 100, "thousand": 1_000, "million": 1_000_000}
_WORD = rf"(?:{'|'.join([*_WORDS, *_SCALES])})"
_IN_WORDS = re.compile(rf"\b(?:(?:minus|negative) )?{_WORD}(?:(?:[ -]| and ){_WORD})*\b(?!-)", re.IGNORECASE)
_ROMAN = re.compile(r"\b(?=[IVXLCDM]{2})(M{0,3})(CM|CD|D?C{0,3})(XC|XL|L?X{0,3})(IX|IV|V?I{0,3})\b")
_LETTERS = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100, "D": 500, "M": 1000}
_NAMES_A_PLACE = re.compile(
    r"\b(?:steps?|lines?|parts?|cases?|rows?|columns?|turns?|rules?|points?|items?|equations?|problems?|questions?|"
    r"terms?|examples?|number|no\.)\s*$",
    re.IGNORECASE,
)
_COUNTS = re.compile(
    r"\s*(?:more |small |last |first )?(?:steps?|lines?|parts?|cases?|mistakes?|errors?|times|places?|digits?|"
    r"decimals?|terms?|numbers?|things?|ways?)\b",
    re.IGNORECASE,
)
_CALLS_IT_THE_ANSWER = re.compile(
    r"(?:\b(?:answer|result|solution)\b[^.\n]{0,20}|####\s*|boxed\s*\{\s*|\bshould be )$", re.IGNORECASE
)
_CALLS_IT = re.compile(r"(?:\b(?:is|be|get|gives?|equals?|to|makes?)|[=:])\s*$", re.IGNORECASE)


def states_answer(reference: str, hint: str, *, problem: str) -> bool:
    """Whether a hint states an answer that is a number or a short text; `problem` is what was asked."""
    hint, wanted = _plain(hint), _value(_plain(reference))
    if wanted is None:
        return _states_text(_plain(reference), hint)
    return _states_number(wanted, hint, asked={value for _, _, value, _ in _numbers(_plain(problem))})


def _plain(text: str) -> str:
    """The text without LaTeX's dress of numbers."""
    text = re.sub(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"\1/\2", text)
    text = re.sub(r"(?<=\d)(?:\{,\}|\\[,;!: ])(?=\d)", ",", text)
    text = re.sub(r"\\(?:text|mathrm|mathbf|textbf)\s*\{([^{}]*)\}", r"\1", text)
    return text.replace("\u2212", "-").replace("**", "").replace("$", " ").replace("_", " ")


def _value(text: str) -> Fraction | None:
    """The number that a reference is, with a unit or without; None where it is anything else, as the code 007."""
    found = _NUMBER.match(text.strip())
    if found is None or re.match(r"0\d", found["top"]) or re.search(r"[\d=+*^(]", text.strip()[found.end() :]):
        return None
    return _as_fraction(found)


def _as_fraction(found: re.Match[str]) -> Fraction | None:
    with suppress(ValueError, ZeroDivisionError):
        value = Fraction(found["top"].replace(",", "") + (found["power"] or "")) / Fraction(found["bottom"] or 1)
        return -value if found["sign"] else value
    return None


def _numbers(text: str) -> Iterator[tuple[int, int, Fraction, bool]]:
    """Where each number of a text stands, its value, and whether it is so common a word that it must be called one."""
    for found in _NUMBER.finditer(text):
        value = _as_fraction(found)
        if value is not None:
            yield found.start(), found.end(), value, False
    for found in _IN_WORDS.finditer(text):
        value = _in_words(found[0])
        yield found.start(), found.end(), value, 0 <= value <= 10  # "one of the two"
    for found in _ROMAN.finditer(text):
        yield found.start(), found.end(), Fraction(_roman(found[0])), False
    for found in re.finditer(r"(?<![\w.,])(?<!\d )\d(?: \d)+(?!\w| \d|[.,]\d)", text):
        yield found.start(), found.end(), Fraction(found[0].replace(" ", "")), False


def _in_words(text: str) -> Fraction:
    whole = part = 0
    for word in re.findall(r"[a-z]+", text.lower()):
        if word == "hundred":
            part = max(part, 1) * 100
        elif word in _SCALES:
            whole, part = whole + max(part, 1) * _SCALES[word], 0
        else:
            part += _WORDS.get(word, 0)
    return Fraction(whole + part) * (-1 if text.lower().startswith(("minus", "negative")) else 1)


def _roman(text: str) -> int:
    values = [_LETTERS[letter] for letter in text]
    return sum(-n if n < max(values[at:]) else n for at, n in enumerate(values))


def _states_number(wanted: Fraction, hint: str, *, asked: set[Fraction]) -> bool:
    listed = re.sub(r"(?m)^(\s*)\d([.)])(?=\s+[A-Za-z])", r"\1-\2", hint)  # 1. First, 2. Then
    for start, end, value, is_common in _numbers(listed):
        before, after = listed[:start], listed[end:]
        is_sum = "/" in listed[start:end] and wanted.denominator == 1  # 84/2 is to be computed
        if value != wanted or is_sum or _NAMES_A_PLACE.search(before) or _COUNTS.match(after):
            continue
        alone = not re.search(r"\w", before + after)
        called = bool(_CALLS_IT_THE_ANSWER.search(before))
        if alone or called or (wanted not in asked and (not is_common or bool(_CALLS_IT.search(before)))):
            return True
    return False


def _states_text(reference: str, hint: str) -> bool:
    if re.fullmatch(r"[\w ]+", reference):
        return re.search(rf"(?<![\w.]){re.escape(reference.strip())}(?!\w)", hint) is not None
    wanted, said = (re.sub(r"\\left|\\right|\\[()\[\]]", "", text) for text in (reference, hint))
    spaced = r"\s*".join(map(re.escape, re.sub(r"\s+", "", wanted)))
    return re.search(rf"(?<![\w.]){spaced}(?!\w|\.\d)", said) is not None


def states_program(name: str, hint: str, *, reference: str) -> bool:
    """Whether a hint writes the function `name`, or what `reference` has in it, under this name, another or none.

    A hint that is nothing but the inside of a function is a program, too, whatever the reference is.
    """
    written = rf"\bdef\s+{re.escape(name)}\s*\(.*:|\b{re.escape(name)}\s*(?::[^=\n]*)?=\s*lambda\b"
    if re.search(written, hint):
        return True
    wanted = [body for code in _snippets(reference) for body in _bodies(code, named=name)]
    if any(isinstance(each, ast.Return) and _says_much(each.value) for each in _parsed(_unfenced(hint))):
        return True
    return bool(wanted) and any(body in wanted for code in _snippets(hint) for body in _bodies(code, named=""))


def _snippets(text: str) -> Iterator[str]:
    """What may be code in a text: all of it, fenced blocks, quotations, single lines, what follows `return` in them."""
    yield _unfenced(text)
    yield from re.findall(r"```[\w+-]*\n(.*?)(?:```|\Z)", text, re.DOTALL)
    yield from re.findall(r"`([^`\n]+)`", text)
    lines = text.splitlines()
    yield from (line for line in lines if line.strip())
    yield from re.findall(r"\b(?:return|lambda)\b[^\n`]*", text)
    indented = [line for line in lines if line.startswith((" ", "\t"))]
    yield "\n".join(indented)


def _unfenced(text: str) -> str:
    found = re.fullmatch(r"\s*```[\w+-]*\n(.*?)(?:```)?\s*", text, re.DOTALL)
    return found[1] if found else text


def _parsed(code: str) -> list[ast.stmt]:
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes in texts
        return ast.parse(dedent(code).strip()).body
    return []


def _bodies(code: str, *, named: str) -> Iterator[str]:
    """What the functions of some code have in them (of `named` alone, where it is given), and what stands outside of
    any: texts that are equal where the code is, whatever its arguments are called."""
    statements = _parsed(code)
    outside = [each for each in statements if not isinstance(each, ast.FunctionDef)]
    for each in ast.walk(ast.Module(statements, [])):
        if isinstance(each, ast.FunctionDef) and named in ("", each.name):
            rest = each.body[1:] if ast.get_docstring(each) is not None else each.body
            yield from _described(rest, each.args, own_names=bool(named))
        elif isinstance(each, ast.Lambda) and not named:
            yield from _described([ast.Return(each.body)], each.args, own_names=False)
    if not named and outside:
        yield "".join(map(ast.dump, outside))
        if len(outside) == 1 and isinstance(outside[0], ast.Expr) and _says_much(outside[0].value):
            yield ast.dump(ast.Return(outside[0].value))


def _described(body: list[ast.stmt], arguments: ast.arguments, *, own_names: bool) -> Iterator[str]:
    text = "".join(map(ast.dump, body))
    if own_names:  # as they stand outside of a function
        yield text
    for number, argument in enumerate(arguments.args):
        text = text.replace(f"Name(id='{argument.arg}'", f"Name(id='#{number}'")
    yield text


def _says_much(value: ast.expr | None) -> bool:
    return value is not None and not isinstance(value, ast.Name | ast.Constant)
