"""What a chat template writes around the texts of a chat, read off a rendering with unique marks in their place.

A layout belongs to a sequence of roles and says what the text of any such chat must be; `masks` checks each chat.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from sftplay.data.records import Message
from sftplay.data.template.templates import ChatTemplate, Span

TRIED_TURNS = 100
"""Up to here, and for the last turn, the inference prompt of each answer is rendered. Further on, an answer before
which the template writes the same text as before an earlier one has the same prompt: to render thousands takes
quadratic time."""

EDGE = " \n "
"""White space put around the marks, to see on which side a template trims."""


class Unproven(Exception):
    """The method cannot vouch for this chat; the message says why."""


@dataclass(frozen=True, slots=True)
class SentinelLayout:
    """What a template writes around the texts of a chat with given roles."""

    gaps: tuple[str, ...]
    """Text before each message, and after the last."""

    keeps_left: tuple[bool, ...]
    keeps_right: tuple[bool, ...]
    """Whether white space at that edge of a message's text survives."""

    heads: tuple[int, ...]
    """For each message, how much of its gap belongs to the inference prompt."""

    tails: tuple[int, ...]
    """For each message, how much of the gap after it belongs to its turn: up to the end-of-turn token."""

    def assemble(self, messages: tuple[Message, ...]) -> tuple[str, list[Span]]:
        """The text the template must give for `messages`, and each message's span in it."""
        parts, spans, at = [self.gaps[0]], [], len(self.gaps[0])
        for index, message in enumerate(messages):
            text = message.content
            text = text if self.keeps_left[index] else text.lstrip()
            text = text if self.keeps_right[index] else text.rstrip()
            gap = self.gaps[index + 1]
            begin = at - len(self.gaps[index]) + self.heads[index]
            spans.append((begin, at + len(text) + self.tails[index]))
            parts += (text, gap)
            at += len(text) + len(gap)
        return "".join(parts), spans


def read_sentinel_layout(template: ChatTemplate, roles: Sequence[str], *, end: re.Pattern[str]) -> SentinelLayout:
    """The layout of chats with these roles; `end` matches an end-of-turn token and white space before it.

    Raises:
        Unproven: a text is missing, doubled or out of order, inference would prompt otherwise, or a turn has no end.
        DataError: the template refuses these roles.
    """
    # Letters between private-use characters: nothing a template trims, splits at or looks for.
    marks = [f"\ue0f0m{index}\ue0f1" for index in range(len(roles))]
    probes = [Message(role, EDGE + mark + EDGE) for role, mark in zip(roles, marks)]  # type: ignore[arg-type]
    text, _ = template.render(probes)
    gaps = _gaps(text, marks)
    keeps_left = tuple(gap.endswith(EDGE) for gap in gaps[:-1])
    keeps_right = tuple(gap.startswith(EDGE) for gap in gaps[1:])
    for index in range(len(roles)):
        gaps[index] = gaps[index].removesuffix(EDGE) if keeps_left[index] else gaps[index]
        gaps[index + 1] = gaps[index + 1].removeprefix(EDGE) if keeps_right[index] else gaps[index + 1]
    heads, tails = [], []
    known: dict[tuple[str, bool], int] = {}
    for index, role in enumerate(roles):
        head = 0
        if role == "assistant" and index > 0:
            form = gaps[index], keeps_left[index]
            if form not in known or index < TRIED_TURNS or index == len(roles) - 1:
                prompt = template.render(probes[:index], prompts=True)[0]
                before = text[: text.index(marks[index])]
                known[form] = _head(before, prompt, gap=gaps[index], edge=len(EDGE) if keeps_left[index] else 0)
            head = known[form]
        heads.append(head)
        tails.append(_tail(gaps[index + 1], end) if role == "assistant" else 0)
    return SentinelLayout(tuple(gaps), keeps_left, keeps_right, tuple(heads), tuple(tails))


def _gaps(text: str, marks: Sequence[str]) -> list[str]:
    gaps, rest = [], text
    for index, mark in enumerate(marks):
        if text.count(mark) != 1 or mark not in rest:
            raise Unproven(f"the text of message {index + 1} appears {text.count(mark)} times or out of order")
        gap, _, rest = rest.partition(mark)
        gaps.append(gap)
    return [*gaps, rest]


def _head(before: str, prompt: str, *, gap: str, edge: int) -> int:
    """How much of `gap`, the template's own text before an answer, the inference prompt ends with."""
    if not before.startswith(prompt):
        raise Unproven(f"at inference an answer would follow {prompt[-40:]!r}, in training {before[-40:]!r}")
    # What follows the prompt is learned: text the template puts first, and white space of the answer where kept.
    return len(gap) - max(len(before) - len(prompt) - edge, 0)


def _tail(gap: str, end: re.Pattern[str]) -> int:
    match = end.match(gap)
    if not match:
        raise Unproven(f"no end-of-turn token follows the assistant's text but {gap[:40]!r}")
    return match.end()
