"""Parse the signs and numbers before the items of lists."""

from __future__ import annotations

import re

SIGNS = "•◦▪▫‣⁃∙●○■□◆◇➢➤✓✔❖\uf0b7\uf0a7\uf0d8\uf076\uf0fc·"
MARKER = re.compile(rf"(?:([{SIGNS}]|[-–—*](?=\s))|(\(?(?:\d{{1,3}}|[a-zA-Z]|[ivx]{{1,5}})[.)])(?=\s))\s*")
"""A sign, or a number or letter with a dot or bracket behind it."""


def split_marker(text: str) -> tuple[str, str]:
    """Return the Markdown marker of a list's item and its text; "" where the text begins with none."""
    found = MARKER.match(text)
    if not found or not text[found.end() :].strip():
        return "", text
    number = found[2] or ""
    rest = text[found.end() :].strip()
    if not number:
        return "- ", rest
    digits = number.strip("().")
    return (f"{digits}. " if digits.isdecimal() else f"- {number} "), rest
