"""The canonical records: the only shapes in which training data travels through the kit."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]

IGNORE_INDEX = -100  # label of a token from which nothing is learned; torch's cross entropy leaves it out


@dataclass(frozen=True, slots=True)
class Source:
    """The place of a record; prints as `path:line`, in a JSON array as `path:line (record 7)`."""

    path: str
    line: int  # line of a text file, row of a parquet file or a hub data set; from 1
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
    arguments: str  # a JSON object, as text
    id: str  # ties the call to its result; some templates print it

    def as_json(self) -> dict[str, Any]:
        """Return the call in the form chat templates use, its arguments as an object."""
        function = {"name": self.name, "arguments": json.loads(self.arguments)}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Message:
    """One turn, as text; an assistant's may call functions, with or without text."""

    role: Role
    content: str
    calls: tuple[Call, ...] = ()  # only an assistant calls
    name: str = ""  # of a tool's turn: the function that gave this result
    call_id: str = ""  # of a tool's turn: the call it answers

    def as_json(self) -> dict[str, Any]:
        """Return the turn in the form chat templates use."""
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
    learned_from: int = 0  # index of the first message that may be learned; assistant turns before it are context only
    tools: str = ""  # the functions the assistant may call, as the JSON text of a list in OpenAI's form; empty for none
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
        """Return one chat for each learned turn, ending with it and learning only it."""
        turns = self.learned_turns()
        return [replace(self, messages=self.messages[: index + 1], learned_from=index) for index in turns]

    def as_json(self) -> dict[str, Any]:
        """Return a json object that `chat_from_json` turns back into the equal chat."""
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
    """Invert `Chat.as_json`."""
    messages = []
    for turn in value["messages"]:
        calls = tuple(
            Call(call["function"]["name"], json.dumps(call["function"]["arguments"], ensure_ascii=False), call["id"])
            for call in turn.get("tool_calls", ())
        )
        name, call_id = turn.get("name", ""), turn.get("tool_call_id", "")
        messages.append(Message(turn["role"], turn["content"], calls, name, call_id))
    source = Source(value["path"], value["line"], value["record"])
    return Chat(tuple(messages), source, value["learned_from"], value["tools"], value["columns"])
