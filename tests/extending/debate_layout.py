"""A new layout: `{"topic": "...", "sides": ["one speaker", "the other", ...]}`; the other speaker is learned."""

from __future__ import annotations

from sftplay.data.files import RowFields, expect_list, expect_text
from sftplay.data.layouts import Body, needed, needed_text
from sftplay.data.records import Message


def _from_debate(row: RowFields) -> Body:
    """The topic begins the first turn; the speakers take turns as user and assistant."""
    sides = expect_list(needed(row, ("sides",))[1], "'sides'", of="texts")
    texts = [expect_text(side, f"sides[{n}]") for n, side in enumerate(sides)]
    texts[:1] = [f"{needed_text(row, ('topic',))}\n\n{text}" for text in texts[:1]]
    return Body(tuple(Message("assistant" if n % 2 else "user", text) for n, text in enumerate(texts)))
