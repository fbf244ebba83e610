"""The canonical records: the only shapes in which training data travels through the kit.

Nothing here reads a file, knows a tokenizer or decides a policy.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]

IGNORE_INDEX = -100
"""Label of a token from which nothing is learned; torch's cross entropy leaves it out."""


@dataclass(frozen=True, slots=True)
class Source:
    """The place of a record; prints as `path:line`, in a JSON array as `path:line (record 7)`."""

    path: str
    line: int
    """Line of a text file, row of a parquet file or a hub data set; from 1."""

    record: int = 0
    """Number of the row in a JSON array, from 1, where a row may take several lines; 0 in all other files."""

    def __str__(self) -> str:
        return f"{self.path}:{self.line}" + (f" (record {self.record:,})" if self.record else "")


@dataclass(frozen=True, slots=True)
class Refused:
    """Replaces a row that could not be read, so that it is counted."""

    reason: str


@dataclass(frozen=True, slots=True)
class Call:
    """A function that the assistant calls."""

    name: str
    arguments: str
    """A JSON object, as text."""

    id: str
    """Ties the call to its result; some templates print it."""

    def as_json(self) -> dict[str, Any]:
        """The call in the form chat templates use, its arguments as an object."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": json.loads(self.arguments)},
        }


@dataclass(frozen=True, slots=True)
class Message:
    """One turn, as text; an assistant's may call functions, with or without text."""

    role: Role
    content: str
    calls: tuple[Call, ...] = ()
    """Only an assistant calls."""

    name: str = ""
    """Of a tool's turn: the function that gave this result."""

    call_id: str = ""
    """Of a tool's turn: the call it answers."""

    def as_json(self) -> dict[str, Any]:
        """The turn in the form chat templates use."""
        turn: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.calls:
            turn["tool_calls"] = [call.as_json() for call in self.calls]
        if self.role == "tool":
            turn |= {"name": self.name, "tool_call_id": self.call_id}
        return turn


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation: perhaps a system message, then user and assistant by turns, the assistant last.

    After an assistant's calls come their results, one tool turn each, and the assistant again.
    """

    messages: tuple[Message, ...]
    source: Source
    learned_from: int = 0
    """Index of the first message that may be learned; assistant turns before it are context only."""

    tools: str = ""
    """The functions the assistant may call, as the JSON text of a list in OpenAI's form; empty for none."""

    columns: str = ""
    """The columns that rewards read in addition to the answer, as the JSON text of an object; empty for nothing."""

    @property
    def prompt(self) -> tuple[Message, ...]:
        """Everything before the last assistant turn."""
        return self.messages[: self.turns()[-1]]

    @property
    def answer(self) -> str:
        """The text of the last assistant turn."""
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
            "record": self.source.record,
            "learned_from": self.learned_from,
            "tools": self.tools,
            "columns": self.columns,
        }


@dataclass(frozen=True, slots=True)
class Text:
    """Plain text, learned from its first token to its end."""

    text: str
    source: Source


Record = Chat | Text


def chat_from_json(value: dict[str, Any]) -> Chat:
    """The inverse of `Chat.as_json`."""
    messages = tuple(_message_from_json(turn) for turn in value["messages"])
    source = Source(value["path"], value["line"], value["record"])
    return Chat(messages, source, value["learned_from"], value["tools"], value["columns"])


@dataclass(frozen=True, slots=True)
class Keys:
    """Sixteen bytes each, equal exactly for records with equal content."""

    content: bytes
    """The whole content to the character, wherever it came from; the ids of calls do not count."""

    normal: bytes
    """The content without differences of white space, case and Unicode normalisation."""

    prompt: bytes
    """Everything before the last answer, in its normal form; of a plain text all of it."""


def compute_keys(record: Record) -> Keys:
    """Compute the digests that identify the content of a record."""
    texts = _texts(record)
    normal = [_normal(text) for text in texts]
    n_answer = 0 if isinstance(record, Text) else len(_turn_texts(record.messages[record.turns()[-1] :]))
    whole = _digest(normal)
    return Keys(_digest(texts), whole, _digest(normal[: len(normal) - n_answer]) if n_answer else whole)


def _message_from_json(turn: dict[str, Any]) -> Message:
    calls = tuple(
        Call(call["function"]["name"], json.dumps(call["function"]["arguments"], ensure_ascii=False), call["id"])
        for call in turn.get("tool_calls", ())
    )
    return Message(turn["role"], turn["content"], calls, turn.get("name", ""), turn.get("tool_call_id", ""))


def _texts(record: Record) -> list[str]:
    if isinstance(record, Text):
        return [record.text]
    return [record.tools, *_turn_texts(record.messages)]


def _turn_texts(messages: Iterable[Message]) -> list[str]:
    texts: list[str] = []
    for message in messages:
        texts += (message.role, message.content)
        for call in message.calls:
            texts += (call.name, call.arguments)
    return texts


def _normal(text: str) -> str:
    folded = text if text.isascii() else unicodedata.normalize("NFKC", text)
    return " ".join(folded.casefold().split())


def _digest(texts: Iterable[str]) -> bytes:
    # The length before each text keeps two different contents from running together into one string.
    whole = "".join([f"{len(text)}:{text}" for text in texts])
    return hashlib.sha256(whole.encode("utf-8", "surrogatepass")).digest()[:16]
