"""A reward for mathematics: a completion's answer is found and compared, numbers by ourselves, formulas by math-verify.

A parser of formulas can be made to run for ever: the reward runs where a deadline ends it (`reward.calls`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

from sftplay.errors import MachineError
from sftplay.reward.completions import Completion, text_of, without_reasoning
from sftplay.reward.reading.numbers import is_same_number, read_number
from sftplay.reward.reading.statements import find_answer, last_box

LONGEST_ANSWER = 500
"""Characters of an answer that are looked at; a longer one is wrong."""

DEEPEST = 12
"""Brackets within brackets of a formula."""

_CHOICE = re.compile(r"\b(?:not|either|neither|to|maybe|perhaps|versus|than|between)\b|≠|\\\\neq?\b", re.IGNORECASE)
"""Words between two answers: who gives both has given none."""

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_VULGAR = {"½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4", "⅕": "1/5", "⅛": "1/8", "⅜": "3/8"}
_CLOSING = {"(": ")]", "[": ")]", "{": "}"}


def solves(
    completions: Sequence[Completion],
    *,
    answer: Sequence[str],
    fallback: Literal["none", "last_number"] = "none",
    **_: Any,
) -> list[float]:
    """1 where the completion's answer equals the row's `answer`, else 0.

    The answer stands in the last `\\boxed{}`, `<answer>` or `####`, in the last sentence that says what the answer is,
    or in a last one that concludes (`therefore 42`). An answer that is taken back is none. `fallback: last_number`
    takes the last number of a completion that has none of these. Where the right answer is a number, a
    number must be given, not a sum that is still to be computed. `answer` may be a whole solution of GSM8K.

    >>> solves(["So \\\\boxed{1{,}234}.", "#### 7"], answer=["1234", "... #### 8"])
    [1.0, 0.0]
    """
    scores = []
    for completion, wanted in zip(completions, answer, strict=True):
        given = find_answer(without_reasoning(text_of(completion)), fallback=fallback)
        scores.append(float(bool(given) and is_equal(given, reference_answer(str(wanted)))))
    return scores


def reference_answer(text: str) -> str:
    """The answer in a reference: behind `####`, in the last box, or the whole text."""
    if "####" in text:
        return text.rpartition("####")[2].strip()
    return last_box(text) or text.strip()


def is_equal(given: str, right: str) -> bool:
    """True when both say the same: as numbers with their units, item by item of a list, else as formulas.

    >>> is_equal("$1,200", "1200"), is_equal("5 cm", "5 m"), is_equal("1/2", "0.5"), is_equal("5 or 6", "5")
    (True, False, True, False)
    """
    if not given or not right or len(given) > LONGEST_ANSWER:
        return False
    given, right = plain(given), plain(right)
    if _folded(given) == _folded(right):
        return True
    if _CHOICE.findall(given) != _CHOICE.findall(right):
        return False
    number, wanted = read_number(given), read_number(right)
    if wanted is not None:
        return number is not None and is_same_number(number, wanted)
    (opens, closes, items), (opened, closed, elements) = _items(given), _items(right)
    is_set = opened == "{" or closed == "or"
    if len(items) > 1 or len(elements) > 1:
        is_alike = (opens, closes) == (opened, closed) or (is_set and opens in ("", "{"))
        if not is_alike or len(items) != len(elements):
            return False
        return _are_same(items, elements) if not is_set else _are_same_set(items, elements)
    return _is_formula(given) and _is_same_formula(given, right)


def _folded(text: str) -> str:
    """Words and times are compared without case, dots and blanks: `3:30 p.m.` is 3:30PM. All else stays as it is."""
    is_words = re.fullmatch(r"(?:\d+:\d+)?\s*[A-Za-z][A-Za-z.' -]+", text) is not None
    return re.sub(r"[. ]", "", text.lower()) if is_words else re.sub(r"\s*([,()\[\]+=<>])\s*", r"\1", text)


def _are_same(items: Sequence[str], elements: Sequence[str]) -> bool:
    return all(map(is_equal, items, elements))


def _are_same_set(items: Sequence[str], elements: Sequence[str]) -> bool:
    rest = list(elements)
    for item in items:
        found = next((each for each in rest if is_equal(item, each)), None)
        if found is None:
            return False
        rest.remove(found)
    return not rest


def _items(text: str) -> tuple[str, str, list[str]]:
    """The brackets around a list and its items; `or` for the closing one where words stand between the items."""
    text = re.sub(r"^[A-Za-z]\s*(?:\\in|∈)\s*", "", text).replace("\\{", "{").replace("\\}", "}")
    opens = closes = ""
    if text[:1] in _CLOSING and text[-1:] in _CLOSING[text[0]] and _depth(text[1:-1]):
        opens, closes, text = text[0], text[-1], text[1:-1]
    depth, items = 0, [""]
    for part in re.split(r"([()\[\]{},;]|\s+(?:or|and)\s+)", text):
        depth += (part in ("(", "[", "{")) - (part in (")", "]", "}"))
        if depth == 0 and part and (part in ",;" or part.strip() in ("or", "and")):
            items.append("")
            closes = "or" if not opens and part not in (",", ";") else closes
        else:
            items[-1] += part
    return opens, closes, [item.strip() for item in items if item.strip()]


def _depth(text: str) -> bool:
    """True where no bracket closes that was not opened before."""
    depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return False
    return depth == 0


def plain(text: str) -> str:
    """An answer without the dress of LaTeX and prose around it; what it says stays."""
    dress = "text|mathrm|textbf|mathbf|boldsymbol|mbox|textrm|operatorname"
    text = re.sub(rf"\\(?:{dress})\s*\{{([^{{}}]*)\}}", r" \1 ", text)
    text = re.sub(r"\\(?:left|right|displaystyle|mathrm|bf|rm|big|Big)(?![a-zA-Z])", "", text.strip())
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\[()\[\]]|\\[,;:! ]|~|[\u00a0\u2009\u202f]|\\quad", " ", text).replace("{,}", ",")
    text = text.replace("\\%", "%").replace("\\$", "$").replace("\\euro", "€").replace("\\pounds", "£")
    text = re.sub("([\u2212\u2010-\u2014])", "-", text).replace("\\times", "×").replace("\\cdot", "*").replace("·", "*")
    text = re.sub(r"\^\{?\\circ\}?|\\degree|\\circ", "°", text)
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda found: "^" + found[0].translate(_SUPERSCRIPTS), text)
    text = re.sub("[½⅓⅔¼¾⅕⅛⅜]", lambda found: " " + _VULGAR[found[0]], text)
    text = re.sub(r"\*\*|__|[`“”\"]", "", text).strip().strip("*_").rstrip(".!").strip()
    if "$" in text:
        text = re.sub(r"\$\$?([^$]+)\$\$?", r" \1 ", text).strip()
    text = _right_side(text.rstrip(".").strip())
    text = re.sub(r"^\(([A-Z])\)$", r"\1", text)
    return re.sub(r"\s+", " ", text).strip()


def _right_side(text: str) -> str:
    """What a name is said to be: 42 of `x = 42`, or of a sum that is right; an equation otherwise as it is."""
    left, equals, right = text.rpartition("=")
    if not equals or not right.strip() or not left or left[-1] in "<>!≠":
        return text
    name = r"(?:\\?[A-Za-z]+\w*\s*){1,4}(?:_\{?\w+\}?)?(?:\([^()]*\))?"
    if "=" not in left and re.fullmatch(name, left.strip()):
        return right.strip()
    sums = [each.strip() for each in left.split("=")]
    is_sum = all(re.fullmatch(r"[\d\s.,+*/^×÷(){}$-]+", each) for each in sums)
    return right.strip() if is_sum and all(_is_same_formula(each.replace("×", "*"), right) for each in sums) else text


def _is_formula(text: str) -> bool:
    """False for text whose braces do not close, or lie so deep that a parser takes minutes to refuse it."""
    depth = 0
    for character in text:
        depth += (character in "{([") - (character in "})]")
        if depth > DEEPEST:
            return False
    return text.count("{") == text.count("}")


@lru_cache(maxsize=4096)
def _is_same_formula(given: str, right: str) -> bool:
    """As math-verify sees it. It is not asked for a deadline: it would take the signals of the process for that."""
    try:
        from math_verify import parse, verify
    except ImportError:
        raise MachineError(
            "math-verify is not installed, which compares formulas",
            where="reward math",
            fix="make install EXTRAS=reward",
        ) from None
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    read = [parse(f"${text}$", parsing_timeout=None, raise_on_error=False) for text in (right, given)]
    # The last element of what it found is the text itself: two texts that cannot be read are not equal for that.
    formulas = [[each for each in found if not isinstance(each, str)] for found in read]
    return all(formulas) and bool(verify(*formulas, timeout_seconds=None, raise_on_error=False))
