"""Foreign layouts of a row -> the canonical chat, or a reason why not.

It looks at one row at a time and never guesses: what it cannot place it refuses with file, line and remedy. Tools,
content in parts and the sharegpt family have no place here yet.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NoReturn

from sftplay.data.records import Chat, Message, Source
from sftplay.errors import DataError, nearest_names

Layout = Literal["messages", "alpaca", "prompt_completion"]
Row = Mapping[str, Any]

ROLES = ("system", "user", "assistant")
OTHER_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "developer": "system"}
UNUSED = ("tool_calls", "function_call", "tool_call_id", "reasoning_content", "thinking")
"""Keys of a message that would change what is learned and are not rendered yet; ignoring them would be silent."""

FIX_ROW = "correct the row, or leave such rows out with data.on_bad_row: skip"
FIX_LAYOUT = "name the layout with data.format (messages, alpaca, prompt_completion), or data.on_bad_row: skip"


def layout_of(row: Row) -> Layout | None:
    """The layout a row's keys belong to, or None."""
    if "messages" in row:
        return "messages"
    if "prompt" in row and "completion" in row:
        return "prompt_completion"
    if "instruction" in row and ("output" in row or "response" in row):
        return "alpaca"
    return None


def to_chat(row: Row, source: Source, layout: Layout | Literal["auto"] = "auto") -> Chat:
    """The row as a chat that obeys every rule of `Chat`; texts are kept to the character.

    Raises:
        DataError: the row has no known layout or breaks a rule; `where` is file:line, `what` the reason.
    """
    found = layout_of(row) if layout == "auto" else layout
    if found is None:
        _refuse(source, f"no known layout has the keys {_listed(row)}", FIX_LAYOUT)
    if row.get("tools") and found == "messages":
        _refuse(source, "has 'tools', which are not rendered yet")
    readers: dict[str, Callable[[Row, Source], Chat]] = {
        "messages": _from_messages,
        "alpaca": _from_alpaca,
        "prompt_completion": _from_prompt,
    }
    chat = readers[found](row, source)
    _check_order(chat)
    return chat


def kind_of(value: object) -> str:
    """A json value's type in words, for messages."""
    if value is None:
        return "null"
    kinds = {bool: "a boolean", int: "a number", float: "a number", str: "a text", list: "a list", dict: "an object"}
    return kinds.get(type(value), f"a {type(value).__name__}")


def _from_messages(row: Row, source: Source) -> Chat:
    return Chat(_turns(_value(row, "messages", source), "messages", source), source)


def _from_alpaca(row: Row, source: Source) -> Chat:
    if row.get("history"):
        _refuse(source, "has a 'history', which this layout does not carry", FIX_LAYOUT)
    instruction = _text(_value(row, "instruction", source), "instruction", source)
    more = row.get("input")
    extra = "" if more is None else _text(more, "input", source)
    prompt = f"{instruction}\n\n{extra}" if extra.strip() else instruction
    key = "output" if row.get("output") is not None or "response" not in row else "response"
    answer = _text(_value(row, key, source), key, source)
    return Chat((*_system(row, source), Message("user", prompt), Message("assistant", answer)), source)


def _from_prompt(row: Row, source: Source) -> Chat:
    """Only the completion is learned, as in TRL: assistant turns inside the prompt are context."""
    before = _side(_value(row, "prompt", source), "prompt", source)
    after = _side(_value(row, "completion", source), "completion", source)
    before = (*_system(row, source), *before)
    return Chat((*before, *after), source, learned_from=len(before))


def _side(value: object, key: str, source: Source) -> tuple[Message, ...]:
    if isinstance(value, list):
        return _turns(value, key, source)
    text = _text(value, key, source)
    return (Message("user" if key == "prompt" else "assistant", text),)


def _system(row: Row, source: Source) -> tuple[Message, ...]:
    value = row.get("system")
    return (Message("system", _text(value, "system", source)),) if value else ()


def _turns(value: object, key: str, source: Source) -> tuple[Message, ...]:
    if isinstance(value, str):  # a csv cell can hold a list only as text
        value = _list_in_text(value, key, source)
    if not isinstance(value, Sequence) or isinstance(value, str):
        _refuse(source, f"{key!r} is {kind_of(value)}, not a list of messages")
    return tuple(_message(turn, f"{key}[{index}]", source) for index, turn in enumerate(value))


def _list_in_text(text: str, key: str, source: Source) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        _refuse(source, f"{key!r} is a text that is not JSON, not a list of messages")


def _message(turn: object, name: str, source: Source) -> Message:
    if not isinstance(turn, dict):
        _refuse(source, f"{name} is {kind_of(turn)}, not an object with role and content")
    role = turn.get("role")
    if role not in ROLES:
        _refuse_role(role, turn, name, source)
    for key in UNUSED:
        if turn.get(key):
            _refuse(source, f"{name} has {key!r}, which is not rendered yet")
    if turn.get("weight", 1) not in (None, 1):
        _refuse(source, f"{name} has weight {turn['weight']!r}; only 1 is known")
    return Message(role, _text(turn.get("content"), f"{name}.content", source))


def _refuse_role(role: object, turn: Mapping[str, Any], name: str, source: Source) -> NoReturn:
    if not isinstance(role, str):
        _refuse(source, f"{name} has no role: its keys are {_listed(turn)}")
    near = OTHER_ROLES.get(role) or next(iter(nearest_names(role, ROLES)), None)
    _refuse(source, f"{name} has the unknown role {role!r}" + (f"; did you mean {near!r}?" if near else ""))


def _text(value: object, name: str, source: Source) -> str:
    if not isinstance(value, str):
        _refuse(source, f"{name} is {kind_of(value)}, not a text")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            _refuse(source, f"{name} holds something at character {error.start + 1} that is not valid Unicode")
    return value


def _check_order(chat: Chat) -> None:
    """System first if at all, then user and assistant by turns, the assistant last, nobody silent."""
    source, turns = chat.source, chat.messages
    if not any(turn.role == "assistant" for turn in turns):
        _refuse(source, "has no assistant turn, so there is nothing to learn")
    begin = 1 if turns[0].role == "system" else 0
    for place, turn in enumerate(turns[begin:]):
        expected = "assistant" if place % 2 else "user"
        if turn.role == "system":
            _refuse(source, f"message {begin + place + 1} is a system message; only the first may be one")
        if turn.role != expected:
            _refuse(source, f"message {begin + place + 1} is from {turn.role!r} where {expected!r} is due")
        if not turn.content.strip():
            _refuse(source, f"message {begin + place + 1}, from {turn.role!r}, is empty")
    if turns[-1].role != "assistant":
        _refuse(source, "ends with a user turn that nobody answers")
    if not chat.learned_turns():
        _refuse(source, "'completion' has no assistant turn")


def _value(row: Row, key: str, source: Source) -> object:
    if key not in row:
        _refuse(source, f"has no key {key!r}; its keys are {_listed(row)}", FIX_LAYOUT)
    return row[key]


def _listed(row: Row) -> str:
    keys = [repr(key)[:40] for key in row]
    return ", ".join(keys[:8]) + (f" and {len(keys) - 8} more" if len(keys) > 8 else "") if keys else "(none)"


def _refuse(source: Source, what: str, fix: str = FIX_ROW) -> NoReturn:
    raise DataError(what, where=str(source), fix=fix)
