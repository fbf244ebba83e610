"""Detect hints that state the right answer: as a number in digits or words, as a text, or as a program.

A number of the problem, or one that counts or names a step, is a leak only where the hint calls it the answer.
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
_WORDS_TO_TWELVE = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
)  # fmt: skip
_TEEN_STEMS = ("thir", "four", "fif", "six", "seven", "eigh", "nine")
_TENS_STEMS = ("twen", "thir", "for", "fif", "six", "seven", "eigh", "nine")
_NUMBER_WORDS = {word: n for n, word in enumerate(_WORDS_TO_TWELVE)}
_NUMBER_WORDS |= {f"{stem}teen": n for n, stem in enumerate(_TEEN_STEMS, 13)}
_NUMBER_WORDS |= {f"{stem}ty": 10 * n for n, stem in enumerate(_TENS_STEMS, 2)}
_SCALE_WORDS = {"hundred": 100, "thousand": 1_000, "million": 1_000_000}
_NUMBER_WORD = rf"(?:{'|'.join([*_NUMBER_WORDS, *_SCALE_WORDS])})"
_SPELLED_NUMBER = re.compile(
    rf"\b(?:(?:minus|negative) )?{_NUMBER_WORD}(?:(?:[ -]| and ){_NUMBER_WORD})*\b(?!-)", re.IGNORECASE
)
_ROMAN_NUMERAL = re.compile(r"\b(?=[IVXLCDM]{2})(M{0,3})(CM|CD|D?C{0,3})(XC|XL|L?X{0,3})(IX|IV|V?I{0,3})\b")
_STEP_NAME = re.compile(
    r"\b(?:steps?|lines?|parts?|cases?|rows?|columns?|turns?|rules?|points?|items?|equations?|problems?|questions?|"
    r"terms?|examples?|number|no\.)\s*$",
    re.IGNORECASE,
)
_COUNTED_NOUN = re.compile(
    r"\s*(?:more |small |last |first )?(?:steps?|lines?|parts?|cases?|mistakes?|errors?|times|places?|digits?|"
    r"decimals?|terms?|numbers?|things?|ways?)\b",
    re.IGNORECASE,
)
_ANSWER_PHRASE = re.compile(
    r"(?:\b(?:answer|result|solution)\b[^.\n]{0,20}|####\s*|boxed\s*\{\s*|\bshould be )$", re.IGNORECASE
)
_RESULT_PHRASE = re.compile(r"(?:\b(?:is|be|get|gives?|equals?|to|makes?)|[=:])\s*$", re.IGNORECASE)


def states_answer(reference: str, hint: str, *, problem: str) -> bool:
    """Whether a hint states an answer that is a number or a short text; `problem` is what was asked."""
    reference, hint = _strip_latex(reference), _strip_latex(hint)
    found, wanted = _NUMBER.match(reference.strip()), None
    # A number may have a unit; anything else, such as the code 007, is a text.
    if found is not None and not re.match(r"0\d", found["top"]):
        is_longer = re.search(r"[\d=+*^(]", reference.strip()[found.end() :])
        wanted = None if is_longer else _parse_fraction(found)
    if wanted is not None:
        asked = {value for _, _, value, _ in _find_numbers(_strip_latex(problem))}
        return _states_number(wanted, hint, asked=asked)
    if re.fullmatch(r"[\w ]+", reference):
        return re.search(rf"(?<![\w.]){re.escape(reference.strip())}(?!\w)", hint) is not None
    wanted_text, given = (re.sub(r"\\left|\\right|\\[()\[\]]", "", text) for text in (reference, hint))
    spaced = r"\s*".join(map(re.escape, re.sub(r"\s+", "", wanted_text)))
    return re.search(rf"(?<![\w.]){spaced}(?!\w|\.\d)", given) is not None


def _strip_latex(text: str) -> str:
    text = re.sub(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"\1/\2", text)
    text = re.sub(r"(?<=\d)(?:\{,\}|\\[,;!: ])(?=\d)", ",", text)
    text = re.sub(r"\\(?:text|mathrm|mathbf|textbf)\s*\{([^{}]*)\}", r"\1", text)
    return text.replace("\u2212", "-").replace("**", "").replace("$", " ").replace("_", " ")


def _parse_fraction(found: re.Match[str]) -> Fraction | None:
    with suppress(ValueError, ZeroDivisionError):
        value = Fraction(found["top"].replace(",", "") + (found["power"] or "")) / Fraction(found["bottom"] or 1)
        return -value if found["sign"] else value
    return None


def _find_numbers(text: str) -> Iterator[tuple[int, int, Fraction, bool]]:
    """Yield start, end and value of each number in a text, and whether it is a common word ("one of the two")."""
    for found in _NUMBER.finditer(text):
        value = _parse_fraction(found)
        if value is not None:
            yield found.start(), found.end(), value, False
    for found in _SPELLED_NUMBER.finditer(text):
        value = _parse_words(found[0])
        yield found.start(), found.end(), value, 0 <= value <= 10
    for found in _ROMAN_NUMERAL.finditer(text):
        digits = [{"I": 1, "V": 5, "X": 10, "L": 50, "C": 100, "D": 500, "M": 1000}[letter] for letter in found[0]]
        value = Fraction(sum(-n if n < max(digits[at:]) else n for at, n in enumerate(digits)))
        yield found.start(), found.end(), value, False
    for found in re.finditer(r"(?<![\w.,])(?<!\d )\d(?: \d)+(?!\w| \d|[.,]\d)", text):
        yield found.start(), found.end(), Fraction(found[0].replace(" ", "")), False


def _parse_words(text: str) -> Fraction:
    whole = part = 0
    for word in re.findall(r"[a-z]+", text.lower()):
        if word == "hundred":
            part = max(part, 1) * 100
        elif word in _SCALE_WORDS:
            whole, part = whole + max(part, 1) * _SCALE_WORDS[word], 0
        else:
            part += _NUMBER_WORDS.get(word, 0)
    return Fraction(whole + part) * (-1 if text.lower().startswith(("minus", "negative")) else 1)


def _states_number(wanted: Fraction, hint: str, *, asked: set[Fraction]) -> bool:
    listed = re.sub(r"(?m)^(\s*)\d([.)])(?=\s+[A-Za-z])", r"\1-\2", hint)  # 1. First, 2. Then
    for start, end, value, is_common in _find_numbers(listed):
        before, after = listed[:start], listed[end:]
        is_calculation = "/" in listed[start:end] and wanted.denominator == 1  # 84/2 is a calculation to do
        if value != wanted or is_calculation or _STEP_NAME.search(before) or _COUNTED_NOUN.match(after):
            continue
        alone = not re.search(r"\w", before + after)
        called = bool(_ANSWER_PHRASE.search(before))
        if alone or called or (wanted not in asked and (not is_common or bool(_RESULT_PHRASE.search(before)))):
            return True
    return False


def states_program(name: str, hint: str, *, reference: str) -> bool:
    """Whether a hint contains the function `name`, or the body of `reference` under any name or none.

    A hint that consists of a function body alone is a program too, whatever the reference is.
    """
    written = rf"\bdef\s+{re.escape(name)}\s*\(.*:|\b{re.escape(name)}\s*(?::[^=\n]*)?=\s*lambda\b"
    if re.search(written, hint):
        return True
    wanted = [body for code in _find_snippets(reference) for body in _find_bodies(code, named=name)]
    statements = _parse(_unfence(hint))
    if any(isinstance(node, ast.Return) and _is_calculation(node.value) for node in statements):
        return True
    return bool(wanted) and any(
        body in wanted for code in _find_snippets(hint) for body in _find_bodies(code, named="")
    )


def _find_snippets(text: str) -> Iterator[str]:
    """Yield what may be code in a text: all of it, fenced blocks, inline code, single lines, text after `return`."""
    lines = text.splitlines()
    yield _unfence(text)
    yield from re.findall(r"```[\w+-]*\n(.*?)(?:```|\Z)", text, re.DOTALL)
    yield from re.findall(r"`([^`\n]+)`", text)
    yield from (line for line in lines if line.strip())
    yield from re.findall(r"\b(?:return|lambda)\b[^\n`]*", text)
    yield "\n".join(line for line in lines if line.startswith((" ", "\t")))


def _unfence(text: str) -> str:
    found = re.fullmatch(r"\s*```[\w+-]*\n(.*?)(?:```)?\s*", text, re.DOTALL)
    return found[1] if found else text


def _parse(code: str) -> list[ast.stmt]:
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes in texts
        return ast.parse(dedent(code).strip()).body
    return []


def _find_bodies(code: str, *, named: str) -> Iterator[str]:
    """Yield the bodies of the functions in some code (only of `named`, if given) and the statements outside functions.

    The texts are equal where the code is equal, whatever the names of the arguments.
    """
    statements = _parse(code)
    outside = [node for node in statements if not isinstance(node, ast.FunctionDef)]
    for node in ast.walk(ast.Module(statements, [])):
        if isinstance(node, ast.FunctionDef) and named in ("", node.name):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
        elif isinstance(node, ast.Lambda) and not named:
            body = [ast.Return(node.body)]
        else:
            continue
        text = "".join(map(ast.dump, body))
        if named:  # as in statements outside a function
            yield text
        for number, argument in enumerate(node.args.args):
            text = text.replace(f"Name(id='{argument.arg}'", f"Name(id='#{number}'")
        yield text
    if not named and outside:
        yield "".join(map(ast.dump, outside))
        if len(outside) == 1 and isinstance(outside[0], ast.Expr) and _is_calculation(outside[0].value):
            yield ast.dump(ast.Return(outside[0].value))


def _is_calculation(value: ast.expr | None) -> bool:
    return value is not None and not isinstance(value, ast.Name | ast.Constant)
