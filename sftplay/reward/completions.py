"""The text of a completion, whichever form it arrives in."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

_THINK = re.compile(r"(?s:.*)</think(?:ing)?>|\s*<think(?:ing)?>(?s:.*)", re.IGNORECASE)
"""Reasoning up to its last end, or to the end of a text that breaks off in it."""

Completion = str | Sequence[Mapping[str, Any]]
"""A text, or the messages of a chat; TRL hands over the second form where the prompt is a chat."""


def read_text(completion: Completion) -> str:
    """Read what the model has written; of messages the content of the last one.

    >>> read_text([{"role": "assistant", "content": "42"}])
    '42'
    """
    if isinstance(completion, str):
        return completion
    content = completion[-1].get("content") if completion else ""
    return content if isinstance(content, str) else ""


def without_reasoning(text: str) -> str:
    """Return the text behind the last closing think tag; nothing of a text that ends in its reasoning; else all of it.

    >>> without_reasoning("<think>6 x 7</think> 42"), without_reasoning("<think>perhaps 42")
    (' 42', '')
    """
    reasoning = _THINK.match(text)
    return text[reasoning.end() :] if reasoning else text
