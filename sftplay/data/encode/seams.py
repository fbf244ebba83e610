"""Where a long text can be cut so that its parts have exactly the tokens of the whole.

The tokenizers library needs about 500 bytes a token while it works on a text: for a million tokens, half a gigabyte.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

PART_CHARACTERS = 1 << 18
"""A part ends at the first seam behind so many characters."""

AROUND = 1_000
"""So many characters on each side of a seam are tokenised together and apart, and must give the same."""

SEAM = re.compile(r"(?<=\S\n)[A-Za-z0-9]")
"""The first letter of a line behind one line break. Splitters of byte-level vocabularies never join the two."""

LOCAL = ("Sequence", "Split", "ByteLevel", "Digits")
"""Splitters that look at the characters around a place only, not at where the text begins."""


def can_be_cut(tokenizer_json: str) -> bool:
    """Whether a tokenizer works on each word alone and finds words by the text around them.

    Then two parts are tokenised like the whole if no word goes over the seam. A normaliser that puts something before a
    text, or that joins characters other than a letter with its accents, forbids it.
    """
    state = json.loads(tokenizer_json)
    normalizer, model = state["normalizer"], state["model"]
    if normalizer is not None and normalizer["type"] != "NFC":
        return False
    if model["type"] != "BPE" or model.get("dropout"):
        return False
    for token in state["added_tokens"]:
        if token["lstrip"] or token["rstrip"] or "\n" in token["content"]:
            return False
    return state["pre_tokenizer"] is not None and _is_local(state["pre_tokenizer"])


def parts_of(text: str, ids_of: Callable[[str], list[int]], *, size: int = PART_CHARACTERS) -> list[str]:
    """The text in parts of about `size` characters; in larger ones where no seam is found."""
    parts, start = [], 0
    while len(text) - start > size:
        end = _seam_behind(text, start + size, ids_of=ids_of)
        if end is None:
            break
        parts.append(text[start:end])
        start = end
    return [*parts, text[start:]]


def _seam_behind(text: str, place: int, *, ids_of: Callable[[str], list[int]]) -> int | None:
    for found in SEAM.finditer(text, place):
        seam = found.start()
        before, behind = text[max(0, seam - AROUND) : seam], text[seam : seam + AROUND]
        if ids_of(before) + ids_of(behind) == ids_of(before + behind):
            return seam
    return None


def _is_local(splitter: dict[str, Any]) -> bool:
    if splitter["type"] == "Sequence":
        return all(map(_is_local, splitter["pretokenizers"]))
    return splitter["type"] in LOCAL and not splitter.get("add_prefix_space", False)
