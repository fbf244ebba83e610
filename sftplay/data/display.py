"""Print token rows: tokens in the loss stand out from those that are only read.

On a terminal they are green and bold, the rest dim, special tokens underlined; elsewhere they stand between marks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from sftplay.data.records import IGNORE_INDEX

OPEN, CLOSE = "\u27e6", "\u27e7"
"""White square brackets: rare in text, and escaped where they do stand in it."""

LEARNED, READ, SPECIAL, RESET = "1;32", "2", ";4", "\x1b[0m"

_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""Characters that steer a terminal or turn the direction of text."""


def legend(*, colours: bool) -> str:
    """Return one line that explains the output of `painted` or `marked`."""
    if colours:
        return f"{_paint('learned', LEARNED)}  {_paint('only read', READ)}  {_paint('special token', READ + SPECIAL)}"
    return f"what stands between {OPEN} and {CLOSE} is learned, all else is only read"


def mark_learned(tokenizer: Any, ids: Sequence[int], *, labels: Sequence[int], colours: bool) -> str:
    """The row's text, special tokens included, with its learned stretches painted or between marks."""
    return painted(tokenizer, ids, labels=labels) if colours else marked(tokenizer, ids, labels=labels)


def painted(tokenizer: Any, ids: Sequence[int], *, labels: Sequence[int]) -> str:
    """The text in colours; characters that would steer the terminal are written as escapes."""
    special = set(tokenizer.all_special_ids) | _added_specials(tokenizer)
    kinds = [(label != IGNORE_INDEX, token in special) for token, label in zip(ids, labels, strict=True)]
    return "".join(
        _paint(visible(text), (LEARNED if is_learned else READ) + SPECIAL * is_special)
        for (is_learned, is_special), text in stretches(tokenizer, ids, kinds=kinds)
    )


def marked(tokenizer: Any, ids: Sequence[int], *, labels: Sequence[int]) -> str:
    """The text as plain characters, learned stretches between OPEN and CLOSE."""
    kinds = [label != IGNORE_INDEX for label in labels]
    return "".join(
        f"{OPEN}{visible(text)}{CLOSE}" if is_learned else visible(text)
        for is_learned, text in stretches(tokenizer, ids, kinds=kinds)
    )


def stretches(tokenizer: Any, ids: Sequence[int], *, kinds: Sequence[Any]) -> Iterator[tuple[Any, str]]:
    """The text of each stretch of tokens of one kind; together they are the whole text."""
    before, end = "", 0
    for kind, group in groupby(kinds):
        start, end = end, end + sum(1 for _ in group)
        # A token's text may depend on those before it: a decoder drops the space at the beginning.
        whole = decoded(tokenizer, ids[:end])
        yield kind, whole[len(before) :] if whole.startswith(before) else decoded(tokenizer, ids[start:end])
        before = whole


def learned_texts(tokenizer: Any, ids: Sequence[int], *, labels: Sequence[int]) -> list[str]:
    """The text of each learned stretch."""
    return [
        text
        for is_learned, text in stretches(tokenizer, ids, kinds=[label != IGNORE_INDEX for label in labels])
        if is_learned
    ]


def decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    """The tokens' text as it is, special tokens included."""
    return str(tokenizer.backend_tokenizer.decode(list(ids), skip_special_tokens=False))


def visible(text: str) -> str:
    """The text with control characters and our own marks as escapes; line ends and tabs stay."""
    return _HIDDEN.sub(_escape, text).replace(OPEN, "\\u27e6").replace(CLOSE, "\\u27e7")


def _escape(match: re.Match[str]) -> str:
    code = ord(match.group())
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def _paint(text: str, colour: str) -> str:
    # Line by line, because pagers forget a colour at the end of a line.
    return "\n".join(f"\x1b[{colour}m{line}{RESET}" if line else "" for line in text.split("\n"))


def _added_specials(tokenizer: Any) -> set[int]:
    return {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
