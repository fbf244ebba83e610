"""A reward for mathematics: find a completion's answer and compare it, numbers exactly, formulas by math-verify.

A parser of formulas can be made to run for ever: the reward runs where a deadline ends it (`reward.reward_set`).
"""

from __future__ import annotations

import logging
import re
import unicodedata
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal

from sftplay.errors import MachineError
from sftplay.reward.code_rewards import Completion, read_text, without_reasoning

LONGEST_ANSWER = 500
"""Characters of an answer, or from the end of a sentence, that are read; a longer answer is wrong."""

DEEPEST = 12
"""Brackets within brackets of a formula. Deeper ones take a parser minutes."""

_BALANCED = r"[^{}]*"
for _ in range(DEEPEST):
    _BALANCED = rf"[^{{}}]*(?:\{{{_BALANCED}\}}[^{{}}]*)*"
_BOX = rf"\\(?:boxed|fbox)\s*\{{({_BALANCED})\}}"
_ANSWER = re.compile(
    r"(?i)\banswer\b[^=:]*?(?:\b(?:is|are|equals|was|be)\b:?|=|:)[\s*]*"
    r"(?:(?:therefore|thus|hence|then|simply|just|exactly|indeed|also),?\s+)*(?P<is>.+)"
    r"|(?P<before>.+?)\s+is\s+(?:the|my|our)\s+(?:\w+\s+)?answer\b|\banswer\s+(?P<bare>[-+$\\\d(].*)"
)
_CLAIM = r"(?:[^\d=]*(?:\b(?:is|are|equals|was|be|get|have|has|gives|obtain)\b|:)\s*)?"
_CONCLUSION = re.compile(
    rf"(?i)^\W*(?:(?:and|but)\s+)?(?:\b(?:therefore|thus|hence|so|in total|finally)\b|∴),?\s*{_CLAIM}(?P<result>.+)"
    rf"|^{_CLAIM}(?P<equation>[^=<>≤≥≠]+(?:=[^=<>≤≥≠]+)+)$"
)
_EXPLANATION = re.compile(
    r"(?i)[\s,;(–—-]+(?:and )?(?:because|since|as|which|where|so|given|by|from|after|see|in total|that|i am)\b.*"
    r"|[,;(–—-]\s*(?:not|rather than|instead of|hence|thus|therefore)\b.*"
)
_NEGATIONS = "not|never|if|unless|suppose|wrong|incorrect|false"
_DENIAL = re.compile(rf"(?i)\b(?:{_NEGATIONS}|cannot|no|assum\w+|guess\w*|doubt\w*|previous)\b|n['’]t\b")
_RETRACTION = re.compile(
    r"(?i)\b(?:wait|actually|oops|correction|scratch that|on second thought|(?:made|is|was) an? (?:mistake|error|typo)|"
    r"(?:is|was|that's|seems|be|looks) (?:wrong|incorrect|false|not (?:right|correct|true))|just kidding|"
    r"never ?mind|or (?:maybe|perhaps|is it)|not sure|i meant)\b|(?:^|[.!?\n]\s?)no[,.!:;]"
)
_PLAIN = {
    r"(?<=\d),\\!\s*(?=\d{3})": ",",
    r"(\\[dt]?frac\s*\{)([\d,.]+\}\s*\{)-(?=[\d,.]+\})": r"\1-\2",
    r"\\(?:text\w*|math\w+|boldsymbol|mbox|operatorname)\s*\{([^{}]*)\}": r" \1 ",
    r"\\(?:left|right|displaystyle)(?![a-zA-Z])|\*\*|__|[`“”\"]": "",
    r"\\[()\[\]]|(?<!\\)\\[,;:! ]|~|\\quad": " ",
    r"\\([%$])|\{(,)\}": r"\1\2",
    r"[\u2212\u2010-\u2014]": "-",
    r"\\times|×|\\cdot|·": "*",
    r"\^\{?\\circ\}?|\\degree": "°",
    r"\$\$?([^$]+)\$\$?": r" \1 ",
    r"^[\s*_]+|[\s*_.]+$": "",
    r"^(?:minus|negative) ": "-",
    r"(?<=\d)(?:st|nd|rd|th)$": "",
    r"^\((\w)\)$": r"\1",
    r"^(?:\\?[A-Za-z]\w*\s+){0,3}\\?[A-Za-z]\w*(?:_\{?\w+\}?)?(?:\([^()]*\))?\s*=\s*(?=[^=])": "",
    r"^[A-Za-z] ?(?:\\in|∈) *": "",
}
"""Patterns of LaTeX, Markdown and Unicode, and what replaces them, in this order."""

_QUALIFIER = re.compile(
    rf"(?<!\\)\b(?:{_NEGATIONS}|either|neither|to|maybe|perhaps|versus|than|between|when|let|more|less|times|plus|"
    r"minus(?! [\d.$\\])|over|squared|cubed|factorial|sqrt|root|mod|divided|is|are|was|but|point|half|twice|short|off|"
    r"too|about|almost|nearly|remainder|below|above|under|beyond)\b"
)
"""Words next to a number that change what it says."""

_INSIDE = rf"(?:[^()\[\]{{}}]|\{{{_BALANCED}\}}|[(\[][^()\[\]]*[)\]])*"
_RELATION = re.compile(r"[<>≤≥]|\\[lg]eq?(?![a-zA-Z])")
_SEPARATOR = re.compile(rf"(?:[,;]|\s(?:or|and)\s)(?!{_INSIDE}[)\]}}])")
_DIGITS = r"(?:\d{1,3}(?:[ ,'’_]\d{3})+|\d{1,2}(?:,\d{2})+,\d{3}|\d+)(?:\.\d+)?|\.\d+"
_SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_NUMBER = re.compile(
    rf"(?i)(?P<sign>[+-]?)\s*(?:(?P<whole>\d+)\s+(?:and\s+)?(?=\d+\s*/))?"
    rf"(?P<top>{_DIGITS})(?:\s*/\s*(?=[0.,]*[1-9])(?P<bottom>{_DIGITS}))?"
    r"(?:\s*(?:e|[*x]\s*10\^)\{?(?P<power>[+-]?\d{1,3})\}?)?"
    rf"\s*(?P<scale>(?:{'|'.join(_SCALES)})\b)?\s*(?P<percent>%|per ?cent\b)?"
    r"\s*(?P<unit>(?:[a-zΩ°$€£¥](?:[a-zΩ°$€£¥./* '-]|\^\{?-?\d\}?)*)?)"
)
_UNITS = {"in": "inch", "inche": "inch", "min": "minute", "hr": "hour", "mph": "mile/hour", "lb": "lbs"}
_UNITS |= {"oz": "ounce", "kW": "kilowatt", "dollar": "$", "USD": "$", "euro": "€", "EUR": "€", "pound": "£"}
_UNITS |= {"sec": "second", "hrs": "hour", "kJ": "kilojoule", "GBP": "£"}
"""Units that sympy does not name."""


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
    given = [find_answer(without_reasoning(read_text(completion)), fallback=fallback) for completion in completions]
    return [float(is_equal(found, reference_answer(str(right)))) for found, right in zip(given, answer, strict=True)]


def reference_answer(text: str) -> str:
    """Read the answer in a reference: behind `####`, in the last box, or the whole text."""
    return text.rpartition("####")[2].strip() if "####" in text else last_box(text) or text.strip()


def last_box(text: str) -> str:
    """Return the content of the last `\\boxed{...}` with balanced braces; empty without any."""
    return ["", *re.findall(_BOX, text)][-1].strip()


def find_answer(text: str, *, fallback: str = "none") -> str:
    """Find the answer that a completion states last; empty where it states none, or takes it back.

    >>> find_answer("First 3. The answer is 4."), find_answer("The answer is 4. Wait, no.")
    ('4', '')
    """
    numbers = [""]
    if fallback == "last_number":
        numbers += re.findall(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|-?\.\d+", text)
    text = re.sub(r"(:|=|\bis)([ \t*_]*)\n\s*(?:\\\[|\$\$)?\s*", r"\1\2 ", text)
    for mark in (_BOX, r"(?is)<answer>((?:(?!</?answer>).)*)</answer>", r"####\s*([^\n]+)"):
        # A mark becomes a sentence. No sentence ends at LaTeX's space ~.
        text = re.sub(mark, lambda found: f"\nanswer: {'~'.join(found[1].split())}.\n", text)
    if re.search(r"\\f?box(?:ed)?\s*\{", text):  # a box that is never closed
        return numbers[-1]
    sentences = [part.strip() for part in re.split(r"(?<=[.!?])(?=[\s*_\"')\]]|$)|\n", text) if re.search(r"\w", part)]
    found = rest = ""
    for at, sentence in enumerate(sentences):
        stated = _stated(sentence, _ANSWER)
        if stated and (not found or re.search(r"\d", stated) or sentence.startswith("answer:")):
            found, rest = stated, "\n".join([sentence.partition(stated)[2], *sentences[at + 1 :]])
    if not found:
        last_number = [sentence for sentence in sentences[-2:] if re.search(r"\d", sentence)][-1:]
        found = "".join(_stated(sentence, _CONCLUSION) for sentence in last_number or sentences[-1:])
        rest = text.rpartition(found)[2] if found else ""
    return "" if _RETRACTION.search(rest) else found.replace("~", " ") or numbers[-1]


def _stated(sentence: str, pattern: re.Pattern[str]) -> str:
    """Return the answer that a pattern finds in a sentence, without explanations; empty if that denies it, or asks."""
    found = pattern.search(sentence[-LONGEST_ANSWER:])
    if found is None or sentence.endswith("?"):
        return ""
    start, end = found.span(str(found.lastgroup))
    if _DENIAL.search(found.string[:start] + found.string[end : found.end()]):
        return ""
    said = re.sub(r"[.!,;]?[\s*_]*$", "", _EXPLANATION.sub("", found.string[start:end].strip()))
    return _stated(said, _ANSWER) or said


def is_equal(given: str, right: str) -> bool:
    """Say whether both say the same: as numbers with their units, item by item of a list, else as formulas.

    >>> is_equal("$1,200", "1200"), is_equal("5 cm", "5 m"), is_equal("1/2", "0.5"), is_equal("5 or 6", "5")
    (True, False, True, False)
    """
    if not given or not right or len(given) > LONGEST_ANSWER:
        return False
    if _QUALIFIER.findall(given.lower()) != _QUALIFIER.findall(right.lower()):
        return False
    given, right = plain(given), plain(right)
    if re.fullmatch(r"(?!.* (?:or|and) )(?:\d+:\d+)?\s*[A-Za-z][A-Za-z.' -]+", right):  # words, or a time of the day
        return re.sub("[. ]", "", given.lower()) == re.sub("[. ]", "", right.lower())
    bases = [re.fullmatch(r"-?[\dA-Fa-f.]+_\{?(\d+)\}?", text) for text in (given, right)]
    if bases[0] and bases[1] and bases[0][1] != bases[1][1]:
        return False
    if given == right:
        return True
    number, wanted = read_number(given), read_number(right)
    if wanted and not number:
        return False
    if wanted and number:
        (value, unit), (right_value, right_unit) = number, wanted
        pair = (value, right_value) if right_unit == "%" else (right_value, value)
        if {unit, right_unit} == {"%", ""} and pair[0] == 100 * pair[1]:
            return abs(pair[0]) >= 1  # People write 50 for 50 %. But 0.5 for 0.5 % would be a hundred times too much.
        return value == right_value and (unit == right_unit or not unit or not right_unit)
    (opening, items), (brackets, elements) = _split_list(given), _split_list(right)
    # (1, 2) may be a point, unless it answers with 1 < x < 2.
    relation, interval = (given, right) if re.search(r"^\[|\]$|\\infty", right) else (right, given)
    is_interval = _RELATION.search(relation) and re.fullmatch(r"[(\[][^,]+,[^,]+[)\]]", interval)
    if is_interval or len(items) == len(elements) == 1:
        return _is_same_formula(given, right)
    if brackets == "{}" or (not brackets and re.search(r"\s(?:or|and)\s", right)):  # a set
        is_in = [[is_equal(item, element) for element in elements] for item in items]
        return opening in ("", "{}") and all(map(any, is_in)) and all(map(any, zip(*is_in)))
    return opening == brackets and len(items) == len(elements) and all(map(is_equal, items, elements))


def plain(text: str) -> str:
    """Strip an answer of LaTeX and Markdown: 42 of `x = 42`, or of `6 * 7 = 42`, which must be true; both of `\\pm`."""
    text = re.sub("([⁰¹²³⁴-⁹⁻]+)", r"^{\1}", re.sub("([¼-¾⅐-⅞])", r" \1", text))
    text = unicodedata.normalize("NFKC", text).replace("\u2044", "/").replace("μ", "u")
    for pattern, replacement in _PLAIN.items():
        text = re.sub(pattern, replacement, text)
    *sums, result = re.split(r"\s*=\s*", text)
    are_true = all(re.fullmatch(r"[\d\s.,+*/^÷(){}$-]+", side) and _is_same_formula(side, result) for side in sums)
    text = result if result and are_true else text
    signs = re.split(r"(?:\\pm(?![a-zA-Z])|±)\s*", text)
    return text if len(signs) != 2 or re.search(r"[,;]|\\mp", text) else f"{'+'.join(signs)} or {'-'.join(signs)}"


def _split_list(text: str) -> tuple[str, list[str]]:
    """The brackets around a list, and its items."""
    text, brackets = re.sub(r"\\(?=[{}])", "", text), ""
    if re.fullmatch(rf"[(\[{{]{_INSIDE}[)\]}}]", text):
        text, brackets = text[1:-1], text[0] + text[-1]
    return brackets, [item.strip() for item in _SEPARATOR.split(text)]


def read_number(text: str) -> tuple[Fraction, str] | None:
    """Read the value of a number with its unit, which is `%` of a percentage; None where it is anything else.

    >>> read_number("-3 1/2 hours"), read_number("50%"), read_number("3 + 4")
    ((Fraction(-7, 2), 'hour'), (Fraction(1, 2), '%'), None)
    """
    text = re.sub(r"\s*\\[dt]?frac\s*(?:\{(-?[\d,.]+)\}|(\d))\s*(?:\{([\d,.]+)\}|(\d)(?!\d))", r" \1\2/\3\4", text)
    found = _NUMBER.fullmatch(re.sub(r"^([+-]?)\s*([$€£¥])(.+)", r"\1\3 \2", text.strip()))
    if found is None or found["unit"] in ("t", "v"):  # more often a variable than tonnes and volts
        return None
    whole, top, bottom = (Fraction(re.sub("[ ,'’_]", "", found[name] or "0")) for name in ("whole", "top", "bottom"))
    value = (whole + top / (bottom or 1)) * Fraction(10) ** int(found["power"] or 0)
    value *= _SCALES.get((found["scale"] or "").lower(), 1) * (-1 if found["sign"] == "-" else 1)
    unit = _unit(found["unit"])
    if re.search(r"\b(?:[a-z]{1,2}|[A-Z])\b", unit):  # a short word that is no unit may be a variable
        return None
    return (value / 100, "%") if found["percent"] else (value, unit)


def _unit(text: str) -> str:
    """Write a unit in one spelling: words as sympy names them, `km` as kilometer; other words in the singular."""
    if not text:
        return ""
    from sympy.physics import units  # type: ignore[import-untyped]

    def name(found: re.Match[str]) -> str:
        word = found[0] if len(found[0]) < 4 else found[0].lower().removesuffix("s")
        word = _UNITS.get(word, word)
        quantity: Any = getattr(units, word, None)
        return str(quantity.name) if type(quantity) is units.Quantity else word

    text = text.replace("°", " degree ").replace(" per ", "/").replace("metre", "meter").replace("litre", "liter")
    text = re.sub(r"\b(square|sq|cubic|cu)\.? (\w+)", lambda area: f"{area[2]}^{2 if area[1][0] == 's' else 3}", text)
    text = re.sub(r"[\s{}.]*([/^]?)[\s{}.]*", r"\1", re.sub(r"[^\W\d_]+", name, text))
    return re.sub(r"([$€£¥])\1", r"\1", text)


@lru_cache(maxsize=4096)
def _is_same_formula(given: str, right: str) -> bool:
    """As math-verify sees it. It is not asked for a deadline: it would take the signals of the process for that."""
    if len(re.findall(r"[(\[]", given)) > DEEPEST or not re.fullmatch(_BALANCED, given):
        return False
    try:
        from math_verify import parse, verify
    except ImportError:
        raise MachineError("math-verify is missing", where="reward math", fix="make install EXTRAS=reward") from None
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    read = [parse(f"${text}$", parsing_timeout=None, raise_on_error=False) for text in (right, given)]
    # The last element of what it found is the text itself: two texts that cannot be read are not equal for that.
    formulas = [[form for form in found if not isinstance(form, str)] for found in read]
    options: dict[str, Any] = {"allow_set_relation_comp": True, "timeout_seconds": None, "raise_on_error": False}
    return all(formulas) and bool(verify(*formulas, float_rounding=15, **options))
