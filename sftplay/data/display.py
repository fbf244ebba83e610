"""Print token rows: tokens in the loss stand out from those that are only read.

On a terminal they are green and bold, the rest dim, special tokens underlined; elsewhere they stand between marks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from sftplay.data.records import IGNORE_INDEX

OPEN, CLOSE = "\u27e6", "\u27e7"  # white square brackets: rare in text, and escaped where they do stand in it
LEARNED, READ, SPECIAL = "1;32", "2", ";4"

_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""Characters that steer a terminal or turn the direction of text."""


def legend(*, colours: bool) -> str:
    """Return one line that explains the output of `mark_learned`."""
    if colours:
        return f"{_paint('learned', LEARNED)}  {_paint('only read', READ)}  {_paint('special token', READ + SPECIAL)}"
    return f"what stands between {OPEN} and {CLOSE} is learned, all else is only read"


def mark_learned(tokenizer: Any, ids: Sequence[int], *, labels: Sequence[int], colours: bool) -> str:
    """Return the row's text, special tokens included, in colours or with its learned stretches between OPEN and CLOSE.

    Characters that would steer the terminal are written as escapes.
    """
    added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    special = {*tokenizer.all_special_ids, *added} if colours else set()
    kinds = [(label != IGNORE_INDEX, token in special) for token, label in zip(ids, labels, strict=True)]
    parts = []
    for (is_learned, is_special), text in stretches(tokenizer, ids, kinds=kinds):
        if colours:
            parts.append(_paint(visible(text), (LEARNED if is_learned else READ) + SPECIAL * is_special))
        else:
            parts.append(f"{OPEN}{visible(text)}{CLOSE}" if is_learned else visible(text))
    return "".join(parts)


def stretches(tokenizer: Any, ids: Sequence[int], *, kinds: Sequence[Any]) -> Iterator[tuple[Any, str]]:
    """Yield the text of each stretch of tokens of one kind; joined they are the whole text."""
    before, end = "", 0
    for kind, group in groupby(kinds):
        start, end = end, end + sum(1 for _ in group)
        # A token's text may depend on those before it: a decoder drops the space at the beginning.
        whole = decoded(tokenizer, ids[:end])
        yield kind, whole[len(before) :] if whole.startswith(before) else decoded(tokenizer, ids[start:end])
        before = whole


def learned_texts(tokenizer: Any, ids: Sequence[int], *, labels: Sequence[int]) -> list[str]:
    """Return the text of each learned stretch."""
    kinds = [label != IGNORE_INDEX for label in labels]
    return [text for is_learned, text in stretches(tokenizer, ids, kinds=kinds) if is_learned]


def decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return the tokens' text as it is, special tokens included."""
    return str(tokenizer.backend_tokenizer.decode(list(ids), skip_special_tokens=False))


def visible(text: str) -> str:
    """Return the text with control characters and our own marks as escapes; line ends and tabs stay."""

    def escape(match: re.Match[str]) -> str:
        code = ord(match.group())
        return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"

    return _HIDDEN.sub(escape, text).replace(OPEN, "\\u27e6").replace(CLOSE, "\\u27e7")


def _paint(text: str, colour: str) -> str:
    # Line by line, because pagers forget a colour at the end of a line.
    return "\n".join(f"\x1b[{colour}m{line}\x1b[0m" if line else "" for line in text.split("\n"))
