"""Where a completion states its answer: in a box, behind a mark, in a sentence that concludes."""

from __future__ import annotations

import re

_BOXES = ("\\boxed", "\\fbox")
_TAG = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL | re.IGNORECASE)
_END = r"(?:[.!?](?=[\s*_\"')\]]|$)|\n|$)"
_SENTENCE = re.compile(rf"(?:[^.!?\n]|[.!?](?![\s*_\"')\]]|$))+{_END}")
_IS = r"(?:\bis\b|\bare\b|\bequals\b|\bwas\b|\bbe\b|=|:)"
_ANSWER = re.compile(
    rf"\banswer\b[^=:]*?{_IS}\W{{0,3}}?\s*(?P<said>.+)|(?P<before>.+?)\s+is\s+(?:the|my|our)\s+(?:\w+\s+)?answer\b"
    r"|\banswer\s+(?P<bare>[-+$\\\d(].*)",
    re.IGNORECASE,
)
_CONCLUDES = re.compile(
    r"^\W*(?:(?:and|but)\s+)?(?:(?:therefore|thus|hence|so|in total|finally)\b|\\therefore|∴)[,:]?\s*(.+)", re.I
)
_CLAIM = re.compile(rf"^[^\d]*?(?:{_IS}|\bget\b|\bhave\b|\bhas\b|\bgives\b|\bobtain\b)\s*(?=[^=]*$)", re.IGNORECASE)
_EQUATION = re.compile(r"[^=<>≤≥≠]+(?:=[^=<>≤≥≠]+)+")
_EXPLAINS = (
    "because|since|as|which|where|so|given|i\\.e\\.|by|from|after|not|rather than|instead of|obviously|respectively|see"
)
_TAIL = re.compile(
    rf"\s(?:{_EXPLAINS}|in total|altogether)\b.*|\s*(?:[,;(–—]|\s-\s)\s*(?:and\s+)?"
    rf"(?:{_EXPLAINS}|that|exactly|hence|thus|therefore)\b.*",
    re.IGNORECASE | re.DOTALL,
)
_DENIES = re.compile(
    r"\b(?:not|never|cannot|no|if|unless|suppose|assum\w+|false|wrong\w*|incorrect\w*|nor|neither|guess\w*|unsure|"
    r"doubt\w*|previous|mistaken\w*)\b|n't\b|n’t\b",
    re.IGNORECASE,
)
_RETRACTS = re.compile(
    r"\b(?:wait|actually|oops|correction|scratch that|on second thought|(?:made|is|was) an? (?:mistake|error|typo)|"
    r"i was wrong|(?:is|was|that's|seems|be|looks) (?:wrong|incorrect|false|not (?:right|correct|true))|just kidding|"
    r"isn't (?:right|correct)|never ?mind|or (?:maybe|perhaps|is it)|not sure|i meant)\b|(?:^|[.!?\n]\s*)no[,.!:;]",
    re.IGNORECASE,
)


_BROKEN = re.compile(r"(\banswer\b[^\n.]{0,80}?(?:is|:|=)[ \t*_]*)\n\s*(?:\\\[|\$\$)?\s*", re.IGNORECASE)
LONGEST_SENTENCE = 400
"""Characters of a sentence that are looked at, from its end."""


def find_answer(text: str, *, fallback: str = "none") -> str:
    """The answer that a completion states last; empty where it states none, or takes it back.

    >>> find_answer("First 3. The answer is 4."), find_answer("The answer is 4. Wait, no.")
    ('4', '')
    """
    text = _BROKEN.sub(r"\1 ", text)
    end, found = _marked(text)
    for sentence in _SENTENCE.finditer(text, end):
        said = _said(sentence[0][-LONGEST_SENTENCE:])
        if said is not None and (not found or re.search(r"\d", said)):
            end, found = sentence.end(), said
    if not found and not end:
        lines = [each for each in _SENTENCE.finditer(text) if re.search(r"\w", each[0])]
        end, found = (lines[-1].end(), _concluded(lines[-1][0][-LONGEST_SENTENCE:])) if lines else (0, "")
        if not found and len(lines) > 1 and re.search(r"\d", text[lines[-2].end() :]) is None:  # a wish behind it
            end, found = lines[-2].end(), _concluded(lines[-2][0][-LONGEST_SENTENCE:])
    if found and _RETRACTS.search(text, end):
        return ""
    numbers = re.findall(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|-?\.\d+", text) if fallback == "last_number" else []
    return found or (numbers[-1] if numbers else "")


def _marked(text: str) -> tuple[int, str]:
    """What stands in the last box, tag or behind the last `####`, and where that ends."""
    found = [(0, "")]
    if boxed := last_box(text):
        begin = text.rfind(boxed)
        found.append((begin + len(boxed) + 1, boxed))
    if tags := list(_TAG.finditer(text)):
        found.append((tags[-1].end(), last_box(tags[-1][1]) or _of_tag(tags[-1][1].strip()[-LONGEST_SENTENCE:])))
    if "####" in text:
        begin = text.rfind("####") + 4
        line = re.compile(r"\s*[^\n]*").match(text, begin)
        assert line is not None
        found.append((line.end(), line[0].strip()))
    return max(found)


def _of_tag(text: str) -> str:
    said = _said(text)
    return text if said is None else said


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


def _said(sentence: str) -> str | None:
    """What a sentence with the word "answer" says it is; None of any other sentence, empty where it denies or asks."""
    found = _ANSWER.search(sentence)
    if found is None:
        return None
    said = (found["said"] or found["before"] or found["bare"]).lstrip(": ")
    said = re.sub(r"^(?:(?:therefore|thus|hence|then|simply|just|exactly|indeed|also),?\s+)+", "", said)
    before = (
        sentence[: found.start()] + found[0].removesuffix(said) if not found["before"] else sentence[: found.start()]
    )
    return "" if _DENIES.search(before) or sentence.rstrip().endswith("?") else _without_tail(said)


def _without_tail(said: str) -> str:
    """A statement without what explains it; empty where that denies it."""
    tail = _TAIL.search(" " + said)
    if tail and _DENIES.search(re.sub(r"^\W*(?:and\s+)?(?:not|rather than)\b", "", tail[0])):
        return ""
    return (" " + said)[: tail.start()].strip().rstrip(".!,;").strip() if tail else said.strip().rstrip(".!,;").strip()


def _concluded(sentence: str) -> str:
    """What the last sentence concludes: `therefore 42`, `so x = 42`, `6 * 7 = 42`; empty where it concludes nothing."""
    concludes = _CONCLUDES.match(sentence)
    said = _without_tail(concludes[1] if concludes else sentence)
    if not said or _DENIES.search(said) or sentence.rstrip().endswith("?"):
        return ""
    if _EQUATION.fullmatch(said):
        return re.sub(r"^(?:[A-Za-z]+\s+){1,4}(?=\S+\s*=)|^\W*\*\*(?=\w)", "", said)
    return _CLAIM.sub("", said) if concludes else ""
