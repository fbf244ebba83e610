"""The text inside one block of HTML: white space made one, code in backticks, links and emphasis as their words.

Addresses of links, emphasis and images are left out: they are no language that a model should learn from a document.
"""

from __future__ import annotations

import re
from typing import Any

DROPPED_NAMES = """
    script style noscript template svg button select input textarea iframe object embed head img audio video canvas
    map area link meta rp rt
"""
DROPPED = frozenset(DROPPED_NAMES.split())
"""Elements without text of the document."""

BREAK = "\x00"
"""Stands for a line break until white space is made one; HTML cannot hold it."""

CODE, DOCUTILS_CODE = ("code", "kbd", "samp", "tt"), "docutils literal"
"""Elements of inline code, and the class by which docutils marks it."""

POWER = re.compile(r"[-+−]?\d+|[a-z]", re.A)
EDGE = re.compile(rf"[ \t\r\n\f]*{BREAK}[ \t\r\n\f]*")
SPACES = re.compile(r"[ \t\r\n\f]+")


def tidy(text: str) -> str:
    """White space as a browser shows it, with line breaks where the document has them."""
    return SPACES.sub(" ", EDGE.sub(BREAK, text)).strip(f" {BREAK}").replace(BREAK, "\n")


def inline_text(element: Any) -> str:
    """The text of an element with that of its inline children; not tidied, without the element's tail."""
    tag = element.tag
    if not isinstance(tag, str) or tag in DROPPED:  # comments and instructions have no name
        return ""
    if tag == "br":
        return BREAK
    if tag == "math":
        return math_text(element)
    inner = (element.text or "") + "".join(inline_text(child) + (child.tail or "") for child in element)
    is_code = tag in CODE or element.get("class") == DOCUTILS_CODE
    if is_code and inner.strip() and "`" not in inner:
        return f"`{inner.strip()}`"
    if tag == "q":
        return f"“{inner}”"
    if tag == "sup" and POWER.fullmatch(inner.strip()):
        return f"^{inner.strip()}"
    return inner


def math_text(element: Any) -> str:
    """A formula as TeX where the document carries it, else as its characters."""
    tex = element.get("alttext") or ""
    for note in element.iter("annotation"):
        if "tex" in (note.get("encoding") or ""):
            tex = note.text or tex
    tex = tex.strip().removeprefix("{\\displaystyle").removesuffix("}" if "displaystyle" in tex else "").strip()
    return f"${tex}$" if tex else "".join(element.itertext())
