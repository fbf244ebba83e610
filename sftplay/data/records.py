"""The canonical records: the only shapes in which training data travels through the kit.

Nothing here reads a file, knows a tokenizer or decides a policy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True, slots=True)
class Source:
    """Where a record came from; prints as `path:line`."""

    path: str
    line: int
    """Line of a text file, row of a json array, a parquet file or a hub data set; from 1."""

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


@dataclass(frozen=True, slots=True)
class Refused:
    """Stands where a row could not be read, so that it is counted and not lost."""

    reason: str


@dataclass(frozen=True, slots=True)
class Message:
    """One turn, as text."""

    role: Role
    content: str

    def as_json(self) -> dict[str, str]:
        """The turn in the form chat templates and files use."""
        return {"role": self.role, "content": self.content}


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation: perhaps a system message, then user and assistant by turns, the assistant last."""

    messages: tuple[Message, ...]
    source: Source
    learned_from: int = 0
    """Index of the first message that may be learned; assistant turns before it are context only."""

    @property
    def prompt(self) -> tuple[Message, ...]:
        """Everything before the last assistant turn."""
        return self.messages[: self.turns()[-1]]

    @property
    def answer(self) -> str:
        """What the last assistant turn says."""
        return self.messages[self.turns()[-1]].content

    def turns(self) -> list[int]:
        """Indices of all assistant turns."""
        return [index for index, message in enumerate(self.messages) if message.role == "assistant"]

    def learned_turns(self) -> list[int]:
        """Indices of the assistant turns that are to be learned."""
        return [index for index in self.turns() if index >= self.learned_from]

    def turns_apart(self) -> list[Chat]:
        """One chat for each learned turn, ending with it and learning only it."""
        return [
            replace(self, messages=self.messages[: index + 1], learned_from=index) for index in self.learned_turns()
        ]

    def as_json(self) -> dict[str, Any]:
        """A json object that `chat_from_json` turns back into the equal chat."""
        return {
            "messages": [message.as_json() for message in self.messages],
            "path": self.source.path,
            "line": self.source.line,
            "learned_from": self.learned_from,
        }


def chat_from_json(value: dict[str, Any]) -> Chat:
    """The inverse of `Chat.as_json`."""
    messages = tuple(Message(turn["role"], turn["content"]) for turn in value["messages"])
    return Chat(messages, Source(value["path"], value["line"]), value["learned_from"])


def content_key(chat: Chat) -> bytes:
    """Sixteen bytes that are equal exactly for chats of the same messages, wherever they came from."""
    return _digest(chat.messages)


def prompt_key(chat: Chat) -> bytes:
    """Sixteen bytes that are equal exactly for chats of the same prompt, whatever the last answer is."""
    return _digest(chat.prompt)


def _digest(messages: Iterable[Message]) -> bytes:
    # The length before each text keeps two different conversations from running together into one string.
    text = "".join(f"{message.role}:{len(message.content)}:{message.content}" for message in messages)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:16]
