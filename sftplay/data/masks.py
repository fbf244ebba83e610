"""Where the assistant's turns lie in the text a chat template makes: three methods, each checked on every chat.

    markers     the template says so itself, by {% generation %} blocks
    sentinels   unique marks in place of all texts show what the template puts between them
    prefixes    the text up to a turn with the answer's header, and the text with the turn, differ by the turn

A turn begins where the inference prompt ends and closes with its end-of-turn token. Everything here is characters; no
tokenizer is involved. Special tokens typed inside a user's text are not told apart from control tokens here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from sftplay.data.records import Chat
from sftplay.data.skeletons import Skeleton, Unproven, read_skeleton
from sftplay.data.templates import ChatTemplate, Span
from sftplay.errors import DataError

Method = Literal["markers", "sentinels", "prefixes"]


@dataclass(frozen=True, slots=True)
class Marked:
    """A rendered chat and the spans of its text that are learned."""

    text: str
    spans: tuple[Span, ...]


class TurnFinder:
    """Finds the learned spans of chats for one template.

    `special_tokens` are all texts that may end a turn; those that do are found by trying, and are `ends` afterwards.
    """

    def __init__(self, template: ChatTemplate, special_tokens: Iterable[str]) -> None:
        self.template = template
        special = list(special_tokens)
        self._special = _pattern(special, "+")
        self._closing = _pattern(special, r"+\s*\Z")
        self._end = _pattern([])
        self._skeletons: dict[tuple[str, ...], Skeleton] = {}
        self.ends: tuple[str, ...] = ()

    def learn_ends(self, chats: Iterable[Chat]) -> None:
        """Remember which run of tokens ends the last turn of these chats; chats the template refuses teach nothing.

        Only a last turn can tell: after any other, the tokens of the next header may follow at once.
        """
        found = set(self.ends)
        for chat in chats:
            try:
                text, _ = self.template.render(chat.messages)
            except DataError:
                continue
            at = self._after_last(text, chat)
            match = self._special.match(text, at) if at >= 0 else self._closing.search(text)
            found |= {match.group().strip()} if match else set()
        self.ends = tuple(sorted(found, key=len, reverse=True))
        self._end = _pattern(self.ends)

    def rewrites(self, chat: Chat) -> bool:
        """True when the template writes a turn differently once other turns follow it."""
        whole, _ = self.template.render(chat.messages)
        for part in chat.turns_apart()[:-1]:
            text, _ = self.template.render(part.messages)
            after = self._after_last(text, part)
            end = after + len(self._end_match(text, after))
            if after >= 0 and not whole.startswith(text[:end]):
                return True
        return False

    def find(self, chat: Chat, method: Method) -> Marked:
        """The chat's text with the spans of its learned turns, each checked against what the assistant says.

        Raises:
            Unproven: the method does not hold for this chat.
            DataError: the template refuses the chat.
        """
        by = {"markers": self._by_markers, "sentinels": self._by_sentinels, "prefixes": self._by_prefixes}
        marked = by[method](chat)
        for (start, end), turn in zip(marked.spans, chat.learned_turns(), strict=True):
            self._check(
                marked.text[start:end], chat.messages[turn].content, marked.text[:start] * (method == "prefixes")
            )
        return marked

    def place(self, chat: Chat, method: Method, *, rewrites: bool) -> list[tuple[Chat, Marked]]:
        """The chat with its marked text; one chat and text for each turn where one text cannot show them all.

        Where `method` does not hold, prefixes are tried.

        Raises:
            Unproven: nothing holds for this chat.
            DataError: the template refuses the chat.
        """
        splittable = len(chat.learned_turns()) > 1
        if not (splittable and rewrites):
            try:
                return [(chat, self._find_or_prefixes(chat, method))]
            except Unproven:
                if not splittable:
                    raise
        return [(part, self._find_or_prefixes(part, method)) for part in chat.turns_apart()]

    def _find_or_prefixes(self, chat: Chat, method: Method) -> Marked:
        try:
            return self.find(chat, method)
        except Unproven:
            if method == "prefixes":
                raise
            return self.find(chat, "prefixes")

    def check_prompts(self, chat: Chat, marked: Marked) -> None:
        """Raise Unproven unless each learned turn follows exactly the text that inference would prompt with."""
        for (start, end), turn in zip(marked.spans, chat.learned_turns(), strict=True):
            prompt, _ = self.template.render(chat.messages[:turn], prompts=True)
            before = marked.text[:start]
            if before.rstrip() != prompt.rstrip():
                raise Unproven(
                    f"in training an answer follows {before[-40:]!r}, at inference it would follow {prompt[-40:]!r}"
                )
            bare, _ = self.template.render(chat.messages[:turn])
            opens_itself = squeezed(marked.text[start:end]).startswith(squeezed(chat.messages[turn].content))
            if bare == prompt and not opens_itself:
                raise Unproven("the template ignores add_generation_prompt, so inference would not open the answer")

    def _by_markers(self, chat: Chat) -> Marked:
        text, spans = self.template.render(chat.messages)
        turns = chat.turns()
        if len(spans) != len(turns):
            raise Unproven(f"{len(spans)} generation blocks for {len(turns)} assistant turns")
        trimmed = [(start, start + len(text[start:end].rstrip())) for start, end in spans]
        return Marked(text, tuple(span for span, turn in zip(trimmed, turns) if turn >= chat.learned_from))

    def _by_sentinels(self, chat: Chat) -> Marked:
        text, _ = self.template.render(chat.messages)
        expected, spans = self._skeleton(tuple(turn.role for turn in chat.messages)).assemble(chat.messages)
        if text != expected:
            raise Unproven("the template writes this chat's texts otherwise than it writes unique marks in their place")
        return Marked(text, tuple(spans[turn] for turn in chat.learned_turns()))

    def _by_prefixes(self, chat: Chat) -> Marked:
        text, _ = self.template.render(chat.messages)
        spans = []
        for turn in chat.learned_turns():
            prompt, _ = self.template.render(chat.messages[:turn], prompts=True)
            upto, _ = self.template.render(chat.messages[: turn + 1])
            end = self._turn_end(upto, chat.messages[turn].content, len(prompt))
            if not text.startswith(prompt) or text[:end] != upto[:end]:
                raise Unproven("the text up to a turn is not the beginning of the whole text")
            spans.append((len(prompt), end))
        return Marked(text, tuple(spans))

    def _turn_end(self, text: str, content: str, begin: int) -> int:
        """End of the last turn: after the token that follows its text, or after the token that ends everything."""
        at = text.rfind(content.strip(), begin)
        tail = self._end_match(text, at + len(content.strip())) if at >= 0 else ""
        return at + len(content.strip()) + len(tail) if tail else len(text.rstrip())

    def _skeleton(self, roles: tuple[str, ...]) -> Skeleton:
        if roles not in self._skeletons:
            self._skeletons[roles] = read_skeleton(self.template, roles, self._end)
        return self._skeletons[roles]

    def _check(self, piece: str, content: str, prompt: str) -> None:
        """A learned piece must be the assistant's text, give or take white space and what the template puts before.

        The text may begin in `prompt`, the inference prompt: some of those open the thinking for the model.
        """
        end = next((end for end in self.ends if piece.endswith(end)), None)
        if end is None:
            raise Unproven(f"the learned text does not close with the end-of-turn token but with {piece[-20:]!r}")
        body = piece[: len(piece) - len(end)]
        if body == content or squeezed(body).endswith(squeezed(content)):
            return
        if not body.strip() or not squeezed(prompt[-len(content) :] + body).endswith(squeezed(content)):
            raise Unproven(f"the template changes or drops part of the assistant's text: {content[:60]!r}")

    def _after_last(self, text: str, chat: Chat) -> int:
        """Position after the last assistant text, or -1 where the template does not print it."""
        content = chat.answer.strip()
        at = text.rfind(content)
        return at + len(content) if at >= 0 else -1

    def _end_match(self, text: str, at: int) -> str:
        match = self._end.match(text, max(at, 0))
        return match.group() if match else ""


def _pattern(tokens: Iterable[str], repeat: str = "") -> re.Pattern[str]:
    """White space, then one of `tokens`, the longest that fits; without tokens it matches nowhere."""
    longest_first = sorted(filter(None, tokens), key=len, reverse=True)
    choice = "|".join(map(re.escape, longest_first)) or "(?!)"
    return re.compile(rf"\s*(?:{choice}){repeat}")


def squeezed(text: str) -> str:
    """The text without any white space."""
    return "".join(text.split())
