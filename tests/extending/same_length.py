"""A new reward: 1 where an answer has as many words as the row's `answer`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sftplay.reward.code_rewards import Completion, read_text


def has_same_length(completions: Sequence[Completion], *, answer: Sequence[str], **_: Any) -> list[float]:
    """1 where the answer has as many words as the row's `answer`, else 0."""
    counts = zip(completions, answer, strict=True)
    return [float(len(read_text(given).split()) == len(str(wanted).split())) for given, wanted in counts]
