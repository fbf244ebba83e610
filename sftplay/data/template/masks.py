"""Where the assistant's turns lie in the text a chat template makes: three methods, each checked on every chat.

    markers     the template says so itself, by {% generation %} blocks
    sentinels   unique marks in place of all texts show what the template puts between them
    prefixes    the text up to a turn with the answer's header, and the text with the turn, differ by the turn

A turn begins where the inference prompt ends and closes with its end-of-turn token; the calls it makes are part of it.
Everything here is characters; no tokenizer is involved. Special tokens that somebody typed are guarded in
`typed_specials`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from sftplay.data.records import Chat, Message
from sftplay.data.template.sentinels import SentinelLayout, Unproven, read_sentinel_layout
from sftplay.data.template.templates import ChatTemplate, Span
from sftplay.data.template.tool_checks import check_results, check_tools, end_of_calls, has_text, uses_tools
from sftplay.errors import DataError

Method = Literal["markers", "sentinels", "prefixes"]


@dataclass(frozen=True, slots=True)
class Marked:
    """A rendered record and the spans of its text that are learned."""

    text: str
    spans: tuple[Span, ...]


class TurnFinder:
    """Finds the learned spans of chats for one template.

    `special_tokens` are all texts that may end a turn; those that do are found by trying, and are `ends` afterwards.
    """

    def __init__(self, template: ChatTemplate, special_tokens: Iterable[str], *, ends: tuple[str, ...] = ()) -> None:
        self.template = template
        special = list(special_tokens)
        self._special = _pattern(special, "+")
        self._closing = _pattern(special, r"+\s*\Z")
        self._layouts: dict[tuple[str, ...], SentinelLayout] = {}
        self._set_ends(ends)

    def learn_ends(self, chats: Iterable[Chat]) -> None:
        """Remember which run of tokens ends the last turn of these chats; chats the template refuses teach nothing.

        Only a last turn can tell: after any other, the tokens of the next header may follow at once.
        """
        found = set(self.ends)
        for chat in chats:
            try:
                text = self.text_of(chat)
            except DataError:
                continue
            match = self._closing_match(text, chat)
            found |= {match.group().strip()} if match else set()
        self._set_ends(tuple(sorted(found, key=len, reverse=True)))

    def rewrites(self, chat: Chat) -> bool:
        """True when the template writes a turn differently once other turns follow it."""
        whole = self.text_of(chat)
        for part in chat.turns_apart()[:-1]:
            text = self.text_of(part)
            after = _after_last(text, part)
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
            prompt = marked.text[:start] * (method == "prefixes")
            self._check(marked.text[start:end], chat.messages[turn], prompt=prompt)
        if method != "sentinels":
            self._check_context(chat, marked)
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

    def text_of(self, chat: Chat) -> str:
        """The chat as the template writes it."""
        return self.template.render(chat.messages, tools=chat.tools)[0]

    def prompt_of(self, chat: Chat, turn: int) -> str:
        """The text that asks the model for the chat's turn of this index."""
        return self.template.render(chat.messages[:turn], tools=chat.tools, prompts=True)[0]

    def check_prompts(self, chat: Chat, marked: Marked) -> None:
        """Raise Unproven unless each learned turn follows exactly the text that inference would prompt with."""
        for (start, end), turn in zip(marked.spans, chat.learned_turns(), strict=True):
            prompt = self.prompt_of(chat, turn)
            before = marked.text[:start]
            if before != prompt:
                raise Unproven(
                    f"in training an answer follows {before[-40:]!r}, at inference it would follow {prompt[-40:]!r}"
                )
            bare, _ = self.template.render(chat.messages[:turn], tools=chat.tools)
            opens_itself = squeezed(marked.text[start:end]).startswith(squeezed(chat.messages[turn].content))
            if bare == prompt and not opens_itself:
                raise Unproven("the template ignores add_generation_prompt, so inference would not open the answer")

    def _by_markers(self, chat: Chat) -> Marked:
        text, spans = self.template.render(chat.messages, tools=chat.tools)
        turns = chat.turns()
        if len(spans) != len(turns):
            raise Unproven(f"{len(spans)} generation blocks for {len(turns)} assistant turns")
        trimmed = [(start, start + len(text[start:end].rstrip())) for start, end in spans]
        return Marked(text, tuple(span for span, turn in zip(trimmed, turns) if turn >= chat.learned_from))

    def _by_sentinels(self, chat: Chat) -> Marked:
        if uses_tools(chat):
            raise Unproven("calls have no text of their own that a mark could stand for")
        text = self.text_of(chat)
        expected, spans = self._sentinel_layout(tuple(turn.role for turn in chat.messages)).assemble(chat.messages)
        if text != expected:
            raise Unproven("the template writes this chat's texts otherwise than it writes unique marks in their place")
        return Marked(text, tuple(spans[turn] for turn in chat.learned_turns()))

    def _by_prefixes(self, chat: Chat) -> Marked:
        text = self.text_of(chat)
        spans = []
        for turn in chat.learned_turns():
            prompt = self.prompt_of(chat, turn)
            is_last = turn == len(chat.messages) - 1
            upto = text if is_last else self.template.render(chat.messages[: turn + 1], tools=chat.tools)[0]
            end = self._turn_end(upto, chat.messages[turn], begin=len(prompt))
            if not text.startswith(prompt):
                raise Unproven(
                    f"in training an answer does not follow {prompt[-40:]!r}, which it would follow at inference"
                )
            if text[:end] != upto[:end]:
                raise Unproven("the text up to a turn is not the beginning of the whole text")
            spans.append((len(prompt), end))
        return Marked(text, tuple(spans))

    def _turn_end(self, text: str, message: Message, *, begin: int) -> int:
        """End of the last turn: after the token that follows its text, or after the token that ends everything."""
        if message.calls:
            match = self._any_end.search(text, end_of_calls(text, message.calls, at=begin))
            return match.end() if match else len(text.rstrip())
        content = message.content.strip()
        at = text.rfind(content, begin)
        tail = self._end_match(text, at + len(content)) if at >= 0 else ""
        return at + len(content) + len(tail) if tail else len(text.rstrip())

    def _sentinel_layout(self, roles: tuple[str, ...]) -> SentinelLayout:
        if roles not in self._layouts:
            self._layouts[roles] = read_sentinel_layout(self.template, roles, end=self._end)
        return self._layouts[roles]

    def _check(self, learned: str, message: Message, *, prompt: str) -> None:
        """A learned learned must be the assistant's text, give or take white space and what the template puts before.

        The text may begin in `prompt`, the inference prompt: some of those open the thinking for the model.
        """
        end = next((end for end in self.ends if learned.endswith(end)), None)
        if end is None:
            raise Unproven(f"the learned text does not close with the end-of-turn token but with {learned[-20:]!r}")
        body, content = learned[: len(learned) - len(end)], message.content
        if message.calls:
            if not has_text(prompt[-len(content) :] * bool(content) + body, message):
                raise Unproven(f"the template drops what the assistant says beside its calls: {content[:60]!r}")
            end_of_calls(body, message.calls, at=0)
            return
        if body == content or squeezed(body).endswith(squeezed(content)):
            return
        if not body.strip() or not squeezed(prompt[-len(content) :] + body).endswith(squeezed(content)):
            raise Unproven(f"the template changes or drops part of the assistant's text: {content[:60]!r}")

    def _check_context(self, chat: Chat, marked: Marked) -> None:
        """Raise Unproven when the template leaves out what the answers answer; earlier answers it may shorten."""
        at = 0
        for message in chat.messages:
            if message.role not in ("system", "user"):
                continue
            # Texts nearly always stand in order; to look from the beginning each time would take quadratic time.
            found = marked.text.find(message.content.strip(), at)
            at = max(at, found)
            if found < 0 and not has_text(marked.text, message):
                raise Unproven(f"the template changes or drops the {message.role}'s text: {message.content[:60]!r}")
        if uses_tools(chat):
            check_results(marked.text, chat, starts=[start for start, _ in marked.spans])
        if chat.tools:
            check_tools(marked.text, self.template.render(chat.messages)[0], tools=chat.tools)

    def _closing_match(self, text: str, chat: Chat) -> re.Match[str] | None:
        """The run of tokens after the last turn's text; after a call, only the end of the text shows it."""
        if not chat.messages[-1].calls:
            at = _after_last(text, chat)
            return self._special.match(text, at) if at >= 0 else self._closing.search(text)
        try:
            prompt = self.prompt_of(chat, len(chat.messages) - 1)
            return self._closing.search(text, end_of_calls(text, chat.messages[-1].calls, at=len(prompt)))
        except (DataError, Unproven):
            return None

    def _set_ends(self, ends: tuple[str, ...]) -> None:
        self.ends = ends
        self._end = _pattern(ends)
        self._any_end = re.compile("|".join(map(re.escape, ends)) or "(?!)")

    def _end_match(self, text: str, at: int) -> str:
        match = self._end.match(text, max(at, 0))
        return match.group() if match else ""


def _after_last(text: str, chat: Chat) -> int:
    """Position after the last assistant text, or -1 where the template does not print it."""
    content = chat.answer.strip()
    at = text.rfind(content)
    return at + len(content) if at >= 0 else -1


def _pattern(tokens: Iterable[str], repeat: str = "") -> re.Pattern[str]:
    """White space, then one of `tokens`, the longest that fits; without tokens it matches nowhere."""
    longest_first = sorted(filter(None, tokens), key=len, reverse=True)
    choice = "|".join(map(re.escape, longest_first)) or "(?!)"
    return re.compile(rf"\s*(?:{choice}){repeat}")


def squeezed(text: str) -> str:
    """The text without any white space."""
    return "".join(text.split())
