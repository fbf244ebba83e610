"""Texts of all scripts that show where two tokenizers differ: made by code, the same ones each time."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Callable

SCRIPTS = {
    "Latin": (0x41, 0x7A), "Latin with marks": (0xC0, 0x24F), "Vietnamese": (0x1EA0, 0x1EF9), "Greek": (0x391, 0x3CE),
    "Cyrillic": (0x410, 0x45F), "Armenian": (0x531, 0x586), "Hebrew": (0x591, 0x5EA), "Arabic": (0x621, 0x669),
    "Syriac": (0x710, 0x74A), "Devanagari": (0x905, 0x96F), "Bengali": (0x985, 0x9EF), "Gurmukhi": (0xA05, 0xA74),
    "Tamil": (0xB85, 0xBEF), "Telugu": (0xC05, 0xC6F), "Sinhala": (0xD85, 0xDF4), "Thai": (0xE01, 0xE59),
    "Lao": (0xE81, 0xEDD), "Tibetan": (0xF00, 0xF6C), "Burmese": (0x1000, 0x104F), "Georgian": (0x10A0, 0x10FA),
    "Hangul jamo": (0x1100, 0x11FF), "Ethiopic": (0x1200, 0x135A), "Cherokee": (0x13A0, 0x13F4),
    "Khmer": (0x1780, 0x17E9),
    "Mongolian": (0x1810, 0x1878), "Hiragana": (0x3041, 0x3096), "Katakana": (0x30A1, 0x30FA), "Han": (0x4E00, 0x9FA5),
    "Hangul": (0xAC00, 0xD7A3), "fullwidth": (0xFF01, 0xFF5E), "Gothic": (0x10330, 0x1034A),
    "letters of mathematics": (0x1D400, 0x1D7FF),
    "Han, rare": (0x20000, 0x2A6D6),
}  # fmt: skip
"""Name -> first and last code point."""

_WORDS = (
    "the", "quick", "brown", "foxes", "don't", "jump", "over", "Anna's", "12", "lazy", "dogs;", "we'll", "see,",
    "they've", "said", "I'm", "here", "and", "you're", "not", "HE'S", "naive", "café", "œuvre", "Straße",
    "ångström", "mañana", "İstanbul", "ﬁne",
)  # fmt: skip
_SPACES = (
    " ", " ", " ", "  ", "   ", "     ", "\t", "\n", "\r\n", "\n\n", "\r\n\r\n", " \n", "\n  ", "\t\t", "\u00a0",
    "\u3000", "\u2009",
)  # fmt: skip
_SIGNS = (
    *"!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~", "...", "--", "->", "!=", "«»", "“x”", "‘y’", "–", "—", "…", "€", "№", "±",
    "、", "。",
)  # fmt: skip
_EMOJI = (
    "😀", "👍🏽", "👩‍👩‍👧‍👦", "🏳️‍🌈", "🇩🇪🇫🇷", "1️⃣", "❤️", "🧑🏿‍🚀",
)  # fmt: skip
_MARKS = (
    "e\u0301", "a\u0308", "n\u0303", "o\u0302\u0323", "ọ\u0302", "\u1100\u1161\u11a8", "क\u094dष", "x\u0338", "\u0301y",
)  # fmt: skip
_CODE = (
    "def f(x):\n    return x**2  # squared\n", "for (int i=0;i<10;++i){\n\tsum+=a[i];\n}\n",
    "<a href=\"x.html\">y</a>\r\n",
    "SELECT * FROM t WHERE a_b >= 3.14;", "\\frac{1}{2} $x_{12}$", "https://example.org/a/b?c=1&d=%20",
    "x = {'a': [1, 2, 3]}",
    "#include <stdio.h>\n\n\n", "if x:\n        pass\n\n    else", "0x1F 1e-5 3,141.59 2026-11-27 12:34:56",
    "\u200bzero\u200dwidth\ufeff",
)  # fmt: skip


def make_texts(count: int = 1000, *, seed: int = 7) -> list[str]:
    """Return texts of words, numbers, white space, signs, emoji, combining marks and code, of all scripts."""
    source = random.Random(seed)
    kinds = [_words, _numbers, _script_words, _script_words, _mixed, _mixed, _code, _anything]
    return [kinds[number % len(kinds)](source) for number in range(count)]


def _words(source: random.Random) -> str:
    words = source.choices(_WORDS, k=source.randint(1, 12))
    return "".join(word + source.choice(_SPACES) for word in words)


def _numbers(source: random.Random) -> str:
    parts = []
    for _ in range(source.randint(1, 6)):
        digits = "".join(source.choices("0123456789", k=source.randint(1, 9)))
        parts.append(source.choice(("", "-", "$", "x", "v")) + digits + source.choice((" ", "", ".", ",", "%", " kg ")))
    return "".join(parts)


def _script_words(source: random.Random) -> str:
    first, last = SCRIPTS[source.choice(list(SCRIPTS))]
    text = ""
    for _ in range(source.randint(1, 6)):
        for _ in range(source.randint(1, 8)):
            letter = chr(source.randint(first, last))
            text += letter if unicodedata.category(letter) != "Cn" else ""
        text += source.choice(_SPACES)
    return text


def _mixed(source: random.Random) -> str:
    makers: tuple[Callable[[], str], ...] = (
        lambda: source.choice(_WORDS),
        lambda: source.choice(_SPACES),
        lambda: source.choice(_SIGNS),
        lambda: source.choice(_EMOJI),
        lambda: source.choice(_MARKS),
        lambda: str(source.randint(0, 99999)),
        lambda: _script_words(source),
    )
    return "".join(source.choice(makers)() for _ in range(source.randint(2, 10)))


def _code(source: random.Random) -> str:
    return "".join(source.choices(_CODE, k=source.randint(1, 3)))


def _anything(source: random.Random) -> str:
    letters = (
        chr(source.choice((source.randint(1, 0x2FF), source.randint(0x300, 0xD7FF), source.randint(0x1F300, 0x1FAFF))))
        for _ in range(source.randint(1, 16))
    )
    return "".join(letter for letter in letters if unicodedata.category(letter) not in ("Cn", "Co", "Cs"))
