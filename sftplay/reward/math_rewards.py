"""A reward for mathematics: a completion's answer is found and compared, numbers by ourselves, formulas by math-verify.

A parser of formulas can be made to run for ever: the reward runs where a deadline ends it (`reward.calls`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal

from sftplay.errors import MachineError
from sftplay.reward.completions import Completion, text_of, without_reasoning

LONGEST_ANSWER = 500
"""Characters of an answer that are looked at; a longer one is wrong."""

DEEPEST = 12
"""Brackets within brackets of a formula."""

LARGEST_EXPONENT = 300
"""Powers of ten beyond it are no answers: their digits alone would fill the memory."""

_BOXES = ("\\boxed", "\\fbox")
_ANSWER_IS = re.compile(r"answer(?:\s+is)?\s*[:=]?\s*(.+)", re.IGNORECASE)
_NUMBER = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+"
_LITERAL = re.compile(
    rf"(?P<sign>[+-]?)\s*(?:(?P<whole>\d+)\s+(?=\d+\s*/))?(?P<top>{_NUMBER})(?:\s*/\s*(?P<bottom>{_NUMBER}))?"
    r"(?:\s*[eE](?P<e>[+-]?\d{1,4})|\s*(?:\*|x|×)\s*10\^\{?(?P<power>[+-]?\d{1,4})\}?)?"
    r"\s*(?P<percent>%?)\s*(?P<unit>.*)"
)
_UNIT = re.compile(r"[A-Za-z°µ$€£][A-Za-z°µ./ ]*(?:\^?[23²³])?(?:/[A-Za-z]+)?")
_CHOICE = re.compile(r"\b(?:or|and|not|either|neither|to|maybe|versus|than)\b", re.IGNORECASE)
"""Words between two answers: who gives both has given none."""

_LETTERS = "°$€£mgshlLCFKWVJA"
"""Units of one letter."""


@dataclass(frozen=True, slots=True)
class Number:
    """A number as it was written: its value, and the unit behind it."""

    value: Fraction
    is_percent: bool
    unit: str


def solves(
    completions: Sequence[Completion],
    *,
    answer: Sequence[str],
    fallback: Literal["none", "last_number"] = "none",
    **_: Any,
) -> list[float]:
    """1 where the completion's answer equals the row's `answer`, else 0.

    The answer stands in the last `\\boxed{}`, or behind the last `####`, or behind the last "answer is". `fallback:
    last_number` takes the last number of a completion that has none of these. Where the right answer is a number, a
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


def find_answer(text: str, *, fallback: Literal["none", "last_number"] = "none") -> str:
    """The answer that a completion gives; empty where it gives none.

    >>> find_answer("First 3. The answer is 4.")
    '4.'
    """
    if boxed := last_box(text):
        return boxed
    if "####" in text:
        return text.rpartition("####")[2].strip().partition("\n")[0].strip()
    if said := _ANSWER_IS.findall(text):
        return str(said[-1]).strip()
    numbers = re.findall(rf"-?(?:{_NUMBER})", text) if fallback == "last_number" else []
    return numbers[-1] if numbers else ""


def last_box(text: str) -> str:
    """What stands in the last `\\boxed{...}` whose braces are balanced; empty without any."""
    start = max(text.rfind(mark) for mark in _BOXES)
    opening = text.find("{", start) if start >= 0 else -1
    if opening < 0 or text[start:opening].strip() not in _BOXES:
        return ""
    depth = 0
    for at in range(opening, len(text)):
        depth += (text[at] == "{") - (text[at] == "}")
        if depth == 0:
            return text[opening + 1 : at].strip()
    return ""


def is_equal(given: str, right: str) -> bool:
    """True when both say the same: as numbers with their units, else as formulas.

    >>> is_equal("$1,200", "1200"), is_equal("5 cm", "5 m"), is_equal("1/2", "0.5"), is_equal("5 or 6", "5")
    (True, False, True, False)
    """
    if not given or not right or len(given) > LONGEST_ANSWER:
        return False
    given, right = plain(given), plain(right)
    if given == right:
        return True
    if len(_CHOICE.findall(given)) != len(_CHOICE.findall(right)):
        return False
    number, wanted = read_number(given), read_number(right)
    if wanted is None:
        return _is_formula(given) and _is_same_formula(given, right)
    return number is not None and _is_same_number(number, wanted)


def plain(text: str) -> str:
    """An answer without the dress of LaTeX and prose around it; what it says stays."""
    text = re.sub(r"\\(?:text|mathrm|textbf|mathbf|mbox|textrm)\s*\{([^{}]*)\}", r" \1 ", text.strip())
    text = text.replace("\\left", "").replace("\\right", "").replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    text = re.sub(r"\\[()\[\]]|\\[,;:! ]|~", " ", text).replace("{,}", ",").replace("\\%", "%").replace("\\$", "$")
    text = text.replace("\u2212", "-").replace("\\times", "×").replace("\\cdot", "*").replace("\\degree", "°")
    text = re.sub(r"\^\{?\\circ\}?", "°", text).replace("**", "").strip().rstrip(".").strip()
    if text.startswith("$") and text.endswith("$") and len(text) > 2:
        text = text[1:-1].strip()
    text = re.sub(r"^[A-Za-z]\w?\s*=\s*(?=[^=]+$)", "", text)
    return re.sub(r"\s+", " ", text).strip()


def read_number(text: str) -> Number | None:
    """The number that a plain text is; None where it is anything else.

    >>> read_number("-3 1/2 hours")
    Number(value=Fraction(-7, 2), is_percent=False, unit='hour')
    """
    text = re.sub(r"(?<=\d)\s*\\frac", r" \\frac", text)
    text = re.sub(r"\\frac\s*\{([\d,.]+)\}\s*\{([\d,.]+)\}", r"\1/\2", text)
    text = re.sub(r"\\frac\s*(\d)\s*(\d)(?!\d)", r"\1/\2", text)
    money = re.match(r"([+-]?)\s*([$€£])\s*", text)
    if money:
        text = money[1] + text[money.end() :]
    found = _LITERAL.fullmatch(text.strip())
    if found is None or (money and found["unit"] and not _CURRENCIES.get(_unit(found["unit"]))):
        return None
    if found["unit"] and not _is_unit(found["unit"]):
        return None
    value = _value(found)
    if value is None:
        return None
    unit = money[2] if money else _unit(found["unit"])
    return Number(value, bool(found["percent"]), _CURRENCIES.get(unit, unit))


_CURRENCIES = {
    "$": "$",
    "dollar": "$",
    "usd": "$",
    "buck": "$",
    "€": "€",
    "euro": "€",
    "eur": "€",
    "£": "£",
    "pound": "£",
}


def _value(found: re.Match[str]) -> Fraction | None:
    exponent = int(found["e"] or found["power"] or 0)
    bottom = Fraction((found["bottom"] or "1").replace(",", ""))
    if abs(exponent) > LARGEST_EXPONENT or not bottom:
        return None
    value = Fraction(found["whole"] or 0) + Fraction(found["top"].replace(",", "")) / bottom
    value *= Fraction(10) ** exponent
    return -value if found["sign"] == "-" else value


def _is_unit(text: str) -> bool:
    """True for words and signs that can be a unit; one letter may as well be a variable, but for those of _LETTERS."""
    return _UNIT.fullmatch(text) is not None and (len(text) > 1 or text in _LETTERS)


def _unit(text: str) -> str:
    """A unit in one spelling: small letters, no plural."""
    return " ".join(word.rstrip(".").removesuffix("s") or word for word in text.lower().split())


def _is_same_number(given: Number, right: Number) -> bool:
    if given.unit and right.unit and given.unit != right.unit:
        return False
    if given.is_percent == right.is_percent:
        return given.value == right.value
    share = (given if given.is_percent else right).value / 100
    whole = (right if given.is_percent else given).value
    # "50" for 50 % is what people write; 0.5 for 0.5 % would be a hundred times too much.
    return share == whole or (share * 100 == whole and abs(whole) >= 1)


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
