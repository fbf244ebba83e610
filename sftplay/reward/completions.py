"""The text of a completion, whichever form it arrives in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

THINK_END = "</think>"

Completion = str | Sequence[Mapping[str, Any]]
"""A text, or the messages of a chat; TRL hands over the second form where the prompt is a chat."""


def text_of(completion: Completion) -> str:
    """What the model has written; of messages the content of the last one.

    >>> text_of([{"role": "assistant", "content": "42"}])
    '42'
    """
    if isinstance(completion, str):
        return completion
    content = completion[-1].get("content") if completion else ""
    return content if isinstance(content, str) else ""


def without_reasoning(text: str) -> str:
    """The text behind the last closing think tag; all of it where there is none.

    >>> without_reasoning("<think>6 x 7</think> 42")
    ' 42'
    """
    return text.rpartition(THINK_END)[2]
