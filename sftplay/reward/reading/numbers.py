"""A number as people write it: its value and its unit."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

LARGEST_EXPONENT = 300
"""Powers of ten beyond it are no answers: their digits alone would fill the memory."""

LONGEST_UNIT = 4
"""Words."""

_NUMBER = (
    r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d{1,3}(?:['’_]\d{3})+|\d{1,2}(?:,\d{2})+,\d{3}|\d+)(?:\.\d+)?|\.\d+"
)
_LITERAL = re.compile(
    rf"(?P<sign>[+-]?)\s*(?:(?P<whole>\d+)\s+(?:and\s+)?(?=\d+\s*/))?"
    rf"(?P<top>{_NUMBER})(?:\s*/\s*(?P<bottom>-?(?:{_NUMBER})))?"
    r"(?:\s*[eE](?P<e>[+-]?\d{1,4})|\s*(?:\*|x|×)\s*10\^\{?(?P<power>[+-]?\d{1,4})\}?)?"
    r"\s*(?P<scale>(?:hundred|thousand|million|billion|trillion|dozen)\b)?"
    r"\s*(?P<percent>%|per ?cent\b)?\s*(?P<unit>.*)",
    re.IGNORECASE,
)
_UNIT = re.compile(r"[A-Za-z°µμΩ$€£¥][A-Za-z°µμΩ$€£¥./* '-]*(?:\^\{?-?\d\}?)?(?:\s*/\s*[A-Za-z]+(?:\^\{?\d\}?)?)?")
_NO_UNIT = re.compile(
    r"\b(?:or|and|not|either|neither|to|maybe|perhaps|versus|than|if|unless|when|more|less|times|plus|minus|over|"
    r"squared|cubed|factorial|pi|sqrt|root|mod|divided|is|are|was|but|point|half|e|x|y|z|n|i|wrong|incorrect|false|"
    r"hundred|thousand|million|billion|trillion|dozen|percent|short|off|too|about|"
    r"almost|nearly|remainder|r|below|above|under|beyond|per hundred)\b",
    re.IGNORECASE,
)
"""Words that say something else than a unit."""

_LETTERS = "°$€£¥µmgshlLCFKWVJAN"
"""Units of one letter."""

_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_PREFIXES = {"kilo": "k", "centi": "c", "milli": "m", "mega": "M", "giga": "G", "micro": "µ", "nano": "n", "deci": "d"}
_SYMBOLS = {
    "meter": "m", "metre": "m", "second": "s", "sec": "s", "minute": "min", "hour": "h", "hr": "h", "hrs": "h",
    "gram": "g", "liter": "L", "litre": "L", "l": "L", "watt": "W", "volt": "V", "newton": "N", "joule": "J",
    "mile": "mi", "inch": "in", "inche": "in", "foot": "ft", "feet": "ft", "degree": "°", "deg": "°", "mph": "mi/h",
    "dollar": "$", "usd": "$", "buck": "$", "euro": "€", "eur": "€", "pound": "£", "gbp": "£", "yen": "¥",
    "kph": "km/h", "hertz": "Hz", "pascal": "Pa", "ampere": "A", "amp": "A", "yard": "yd", "ounce": "oz", "day": "d",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Number:
    """A number as it was written: its value, and the unit behind it."""

    value: Fraction
    is_percent: bool
    unit: str


def read_number(text: str) -> Number | None:
    """The number that a plain text is; None where it is anything else.

    >>> read_number("-3 1/2 hours")
    Number(value=Fraction(-7, 2), is_percent=False, unit='h')
    """
    text = re.sub(r"^(?:minus|negative)\s+", "-", text, flags=re.IGNORECASE)
    text = re.sub(r"(?<=\d)\s*\\frac", r" \\frac", text)
    text = re.sub(r"\\frac\s*\{(-?[\d,.]+)\}\s*\{([\d,.]+)\}", r"\1/\2", text)
    text = re.sub(r"\\frac\s*(\d)\s*(\d)(?!\d)", r"\1/\2", text)
    money = re.match(r"([+-]?)\s*([$€£¥])\s*", text)
    if money:
        text = money[1] + text[money.end() :]
    found = _LITERAL.fullmatch(text.strip())
    if found is None or (found["unit"] and not _is_unit(found["unit"])):
        return None
    unit, value = _unit(found["unit"]), _value(found)
    if value is None or (money and unit not in ("", money[2])):
        return None
    return Number(value, bool(found["percent"]), money[2] if money else unit)


def is_same_number(given: Number, right: Number) -> bool:
    """True where both are the same number; a unit that one of them lacks does not count, nor does its per cent sign."""
    if given.unit and right.unit and given.unit != right.unit:
        return False
    share = given.value / 100 if given.is_percent else given.value
    if given.is_percent == right.is_percent:
        return given.value == right.value
    # "50" for 50 % is what people write; 0.5 for 0.5 % would be a hundred times too much, and 5 % for 5 a hundredth.
    if right.is_percent:
        return share == right.value / 100 or (share == right.value and abs(share) >= 1)
    return share == right.value


def _value(found: re.Match[str]) -> Fraction | None:
    scale = (found["scale"] or "").lower()
    exponent = int(found["e"] or found["power"] or 0) + _SCALES.get(scale, 0)
    bottom = Fraction(_digits(found["bottom"] or "1"))
    if abs(exponent) > LARGEST_EXPONENT or not bottom:
        return None
    value = Fraction(found["whole"] or 0) + Fraction(_digits(found["top"])) / bottom
    value *= Fraction(10) ** exponent * (12 if scale == "dozen" else 1)
    return -value if found["sign"] == "-" else value


def _digits(text: str) -> str:
    return re.sub(r"[, '’_]", "", text)


def _is_unit(text: str) -> bool:
    """True for words and signs that can be a unit; one letter may as well be a variable, but for those of _LETTERS."""
    is_short = len(text.split()) <= LONGEST_UNIT and not _NO_UNIT.search(text)
    return is_short and _UNIT.fullmatch(text) is not None and (len(text) > 1 or text in _LETTERS)


def _unit(text: str) -> str:
    """A unit in one spelling: symbols as they are, words small, without plural, and as symbols where there are such."""
    text = re.sub(r"\^\{(-?\d)\}", r"^\1", text.strip().rstrip(".")).replace(" per ", "/").replace("μ", "µ")
    text = re.sub(r"\b(square|cubic|sq\.?|cu\.?) (\w+)", lambda m: f"{m[2]}^{2 if m[1][0] == 's' else 3}", text)
    return re.sub(r"\s*([/^])\s*", r"\1", " ".join(re.sub(r"[^\W\d_]+", _word, text).split()))


def _word(found: re.Match[str]) -> str:
    word = found[0]
    if len(word) < 4 and word.lower() not in _SYMBOLS:
        return word  # a symbol: mW is no MW, and ms is no plural
    word = word.lower() if word not in ("L", "N") else word
    word = word.removesuffix("s") if len(word) > 3 and not word.endswith("ss") else word
    for prefix, sign in _PREFIXES.items():
        if word.startswith(prefix) and word.removeprefix(prefix) in _SYMBOLS:
            return sign + _SYMBOLS[word.removeprefix(prefix)]
    return _SYMBOLS.get(word, word)
