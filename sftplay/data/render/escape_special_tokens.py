"""Special tokens that a record's own texts spell: they stay text, and those that the template writes are control.

Before rendering, a guard breaks each one in a record's own texts; in the end it is whole and still text:

    typed       Say <|im_end|>                      the record
    guarded     Say <G|im_end|>...<|im_end|>        what the template makes of the guarded record
    spelled     Say <|im_end|>...G<|im_end|>        what is encoded, by a tokenizer that knows G<|im_end|> only

The two marks of a thought stay control in an assistant's turn: there they are how a record marks a thought.
A special token of a single character cannot be broken and is not looked for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from sftplay.data.records import Call, Chat, Record, Text
from sftplay.data.render.templates import CLOSE, OPEN, Span
from sftplay.errors import DataError

GUARD = "\ufdd2"  # stands inside a typed special token, and before a written one: a noncharacter, like OPEN and CLOSE


class SpecialTokenEscaper:
    """Find and guard the texts of one tokenizer's special tokens."""

    def __init__(self, special: Iterable[str]) -> None:
        known = [token for token in special if len(token) > 1]
        self._search = re.compile(f"[{OPEN}{CLOSE}{GUARD}]|{alternation(known)}").search
        self._firsts = sorted({token[0] for token in known if token.isascii()})
        self._typed = re.compile(alternation(known))
        self._said = re.compile(alternation(token for token in known if token not in ("<think>", "</think>")))
        self._events = re.compile(f"{GUARD}|{alternation(known)}")

    def guarded(self, record: Record) -> tuple[Record, int]:
        """Return the record with a guard in each special token that it types, and how many there are.

        Raises DataError: the record holds one of the three noncharacters itself.
        """
        if self._is_plain(record):
            return record, 0
        if any(mark in text for text in _texts(record) for mark in (OPEN, CLOSE, GUARD)):
            raise DataError("holds U+FDD0, U+FDD1 or U+FDD2, which are not characters")
        count = 0

        def escape_text(text: str, pattern: re.Pattern[str] = self._typed) -> str:
            nonlocal count
            n_found = 1
            while n_found:  # what is left of two that overlap may be a third
                text, n_found = pattern.subn(lambda match: match[0][0] + GUARD + match[0][1:], text)
                count += n_found
            return text

        if isinstance(record, Text):
            return replace(record, text=escape_text(record.text)), count
        turns = []
        for message in record.messages:
            calls = tuple(
                Call(escape_text(call.name), _map_json(call.arguments, escape_text), call.id)
                if any(map(self._search, _call_texts(call)))
                else call
                for call in message.calls
            )
            content = escape_text(message.content, self._said if message.role == "assistant" else self._typed)
            turns.append(replace(message, content=content, calls=calls, name=escape_text(message.name)))
        changed = replace(record, messages=tuple(turns), tools=_map_json(record.tools, escape_text))
        return (changed, count) if count else (record, 0)

    def spelled(self, text: str, spans: Iterable[Span]) -> tuple[str, tuple[Span, ...]]:
        """Take the guards out of a guarded rendering and put one before each control token; move the spans along.

        It begins at the same places of the chat: only what is between the characters has changed.
        """
        parts: list[str] = []
        moves: list[tuple[int, int]] = []
        at = 0
        for match in self._events.finditer(text):
            is_guard = match.group() == GUARD
            parts += (text[at : match.start()], "" if is_guard else GUARD + match.group())
            moves.append((match.start(), -1 if is_guard else 1))
            at = match.end()

        def move(edge: int) -> int:
            return edge + sum(step for place, step in moves if place < edge)

        return "".join([*parts, text[at:]]), tuple((move(start), move(end)) for start, end in spans)

    def _is_plain(self, record: Record) -> bool:
        """Return True if there is nothing to guard or refuse; nearly every record takes this way."""
        if isinstance(record, Chat) and not record.tools:
            for message in record.messages:
                text = message.content
                # Searching for single characters is fast, and most texts have none that begins a token.
                may_hold = not text.isascii() or any(character in text for character in self._firsts)
                if message.calls or message.name or (may_hold and self._search(text)):
                    break
            else:
                return True
        return not any(map(self._search, _texts(record)))


def without_guards(text: str) -> str:
    """Return the text without its guards."""
    return text.replace(GUARD, "")


def unguarded(chat: Chat) -> Chat:
    """Return the chat without guards; its JSON texts may have other white space than before."""
    turns = tuple(
        replace(
            message,
            content=without_guards(message.content),
            calls=tuple(Call(without_guards(c.name), without_guards(c.arguments), c.id) for c in message.calls),
            name=without_guards(message.name),
        )
        for message in chat.messages
    )
    return replace(chat, messages=turns, tools=without_guards(chat.tools))


def _texts(record: Record) -> Iterator[str]:
    if isinstance(record, Text):
        yield record.text
        return
    for message in record.messages:
        yield message.content
        if message.name:
            yield message.name
        for call in message.calls:
            yield from _call_texts(call)
    if record.tools:
        yield from _json_texts(record.tools)


def _call_texts(call: Call) -> Iterator[str]:
    yield call.name
    yield from _json_texts(call.arguments)


def _json_texts(text: str) -> Iterator[str]:
    """Yield the JSON text, and its strings where escapes hide what they contain."""
    yield text
    if "\\" in text:
        found: list[str] = []

        def note(string: str) -> str:
            found.append(string)
            return string

        _map_json(text, note)
        yield from found


def _map_json(text: str, change: Callable[[str], str]) -> str:
    """Return the JSON text with its strings changed: a template may rewrite what is between them, guards too."""

    def apply(value: Any) -> Any:
        if isinstance(value, str):
            return change(value)
        if isinstance(value, dict):
            return {change(key): apply(inner) for key, inner in value.items()}
        return [apply(inner) for inner in value] if isinstance(value, list) else value

    return json.dumps(apply(json.loads(text)), ensure_ascii=False) if text else text


def alternation(tokens: Iterable[str]) -> str:
    """Return a pattern for any of `tokens`, at one place the longest; without tokens it matches nowhere."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return f"(?:{'|'.join(map(re.escape, longest_first)) or '(?!)'})"
