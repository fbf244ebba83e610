"""Prompts put together from token ids.

The text around the places is tokenised once; what was sampled is never tokenised again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from sftplay.config.schema.score import PLACE, PromptsConfig
from sftplay.data.encode.render import Renderer
from sftplay.data.records import Message
from sftplay.errors import RunError

MARKS = {"problem": "\ue000", "attempt": "\ue001", "hint": "\ue002"}
"""Characters of Unicode's private use: no template writes them."""


@dataclass(frozen=True)
class Template:
    """A prompt as runs of token ids with named places between them."""

    parts: tuple[tuple[int, ...] | str, ...]

    def filled(self, ids: Mapping[str, Sequence[int]], *, room: int) -> list[int]:
        """The prompt with token ids at its places, of at most `room` tokens.

        Where it is longer, the middle of the attempt is left out. Problem and hint are never cut.

        Raises:
            RunError: problem and hint alone are too long.
        """
        runs = self._runs(ids)
        spare = room - sum(map(len, runs))
        if spare < 0 and "attempt" in self.parts:
            attempt = without_middle(ids["attempt"], max(0, len(ids["attempt"]) + spare))
            spare += len(ids["attempt"]) - len(attempt)
            runs = self._runs({**ids, "attempt": attempt})
        if spare < 0:
            raise RunError(
                f"problem and hint need {-spare} tokens more than the {room} that a prompt may have",
                where="score",
                fix="raise model.max_seq_len, or lower score.max_new_tokens or score.max_hint_tokens",
            )
        return list(chain.from_iterable(runs))

    def _runs(self, ids: Mapping[str, Sequence[int]]) -> list[Sequence[int]]:
        return [ids[part] if isinstance(part, str) else part for part in self.parts]


@dataclass(frozen=True)
class Templates:
    """The three prompts of an episode."""

    solve: Template
    guide: Template
    revise: Template


def make_templates(prompts: PromptsConfig, renderer: Renderer, *, system: str | None) -> Templates:
    """The prompts as token ids, in the chat template where the renderer has one."""
    solve, guide, revise = (
        _template(text, renderer, system=system) for text in (prompts.solve, prompts.guide, prompts.revise)
    )
    return Templates(solve, guide, revise)


def tokens_of(tokenizer: Any, text: str) -> list[int]:
    """Plain text as token ids; a control token that it spells stays text."""
    return tokens_of_each(tokenizer, [text])[0]


def tokens_of_each(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """The same for many texts in one call."""
    ids = tokenizer(list(texts), add_special_tokens=False, split_special_tokens=True)["input_ids"]
    return [each if text else [] for text, each in zip(texts, ids, strict=True)]


def without_middle(ids: Sequence[int], length: int) -> list[int]:
    """The first and the last of the ids, `length` in all.

    >>> without_middle([1, 2, 3, 4, 5], 3)
    [1, 2, 5]
    """
    if len(ids) <= length:
        return list(ids)
    tail = length // 2
    return [*ids[: length - tail], *ids[len(ids) - tail :]]


def _template(text: str, renderer: Renderer, *, system: str | None) -> Template:
    marked = PLACE.sub(lambda found: MARKS[found[1]], text)
    tokenizer, names = renderer.tokenizer, {mark: name for name, mark in MARKS.items()}
    begin: list[int] = []
    if renderer.template is None:
        # A tokenizer that begins texts with a token of its own does so here.
        begin = tokenizer("")["input_ids"] if tokenizer.bos_token_id is not None else []
        begin = [token for token in begin if token == tokenizer.bos_token_id]
    else:
        messages = [Message("system", system)] if system else []
        marked = renderer.prompt_text([*messages, Message("user", marked)])
    parts: list[tuple[int, ...] | str] = [tuple(begin)] if begin else []
    piece = ""
    for character in [*marked, None]:
        if character is not None and character not in names:
            piece += character
            continue
        if piece:
            parts.append(tuple(tokenizer(piece, add_special_tokens=False)["input_ids"]))
        piece = ""
        if character is not None:
            parts.append(names[character])
    return Template(tuple(parts))
