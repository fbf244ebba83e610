"""Checks of a row's values, and messages as OpenAI writes them, which become canonical turns."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from sftplay.data.records import Call, Message, Role
from sftplay.errors import DataError

BROKEN_JSON = (ValueError, RecursionError)
"""Errors that decoding raises: RecursionError for nesting deeper than the interpreter's stack."""


def decode_json(text: str) -> Any:
    """Return the value; a repeated key in one object is an error, since json would keep only the last."""
    return _DECODER.decode(text)


def describe_json_error(error: Exception) -> str:
    """Describe what is wrong with a text that `decode_json` refused."""
    if isinstance(error, json.JSONDecodeError):
        place = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno} column {error.colno}"
        return f"is not JSON: {error.msg} at {place}"
    return str(error) if isinstance(error, RepeatedKeyError) else f"is not JSON that can be read: {error}"


class RepeatedKeyError(ValueError):
    """An object names a key twice."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RepeatedKeyError(f"has the key {twice[:60]!r} twice in one object")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_object)


RowFields = Mapping[str, Any]

FIX_ROW = "correct the row, or leave such rows out with data.on_bad_row: skip"


def refuse(what: str, fix: str = FIX_ROW) -> NoReturn:
    """Raise the DataError that `convert` completes with file and line."""
    raise DataError(what, fix=fix)


def describe_type(value: object) -> str:
    """Name a json value's type in words, for messages."""
    if value is None:
        return "null"
    kinds = {bool: "a boolean", int: "a number", float: "a number", str: "a text", list: "a list", dict: "an object"}
    return kinds.get(type(value), f"a {type(value).__name__}")


def listed(names: Iterable[object]) -> str:
    """Quote up to eight of the names."""
    keys = [repr(key)[:40] for key in names]
    return ", ".join(keys[:8]) + (f" and {len(keys) - 8} more" if len(keys) > 8 else "") if keys else "(none)"


def expect_text(value: object, name: str) -> str:
    """Return `value` if it is a text of valid characters."""
    if not isinstance(value, str):
        refuse(f"{name} is {describe_type(value)}, not a text")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            refuse(f"{name} holds something at character {error.start + 1} that is not valid Unicode")
    return value


def expect_list(value: object, name: str, *, of: str) -> Sequence[Any]:
    """Return `value` if it is a list, or the list in its JSON text: a csv cell can hold a list only as text."""
    if isinstance(value, str):
        value = parse_json(value, name, due=f"a list of {of}")
    if not isinstance(value, list | tuple):
        refuse(f"{name} is {describe_type(value)}, not a list of {of}")
    return value


def parse_json(text: str, name: str, *, due: str) -> Any:
    """Return the value of a JSON text; `due` names what the error expects there."""
    try:
        return decode_json(text)
    except BROKEN_JSON as error:
        refuse(f"{name} is a text that is not JSON, where {due} is due: it {describe_json_error(error)}")


def is_blank(value: object) -> bool:
    """Return True for an empty value of an optional column: null, an empty text or an empty list."""
    return value is None or value in ("", [], {}) or (isinstance(value, str) and value.isspace())


OPENAI_ROLES: dict[str, Role] = {
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    **dict.fromkeys(("tool", "function"), "tool"),
}
PLAIN = {"role", "content", "from", "value", "text", "name", "id", "tool_calls", "function_call", "tool_call_id"}
UNHONOURED = (
    *("reasoning_content", "reasoning", "thinking", "thought", "thoughts"),
    *("refusal", "audio", "images", "image", "videos", "train_detail"),
)
"""Keys of a message that would change what is learned and that are not rendered; ignoring them would be silent."""


def openai_turns(value: object, name: str) -> tuple[Message, ...]:
    """Read a list of objects with `role` and `content` as messages, in order."""
    messages = []
    for index, turn in enumerate(expect_list(value, repr(name), of="messages")):
        place = f"{name}[{index}]"
        if not isinstance(turn, Mapping):
            refuse(f"{place} is {describe_type(turn)}, not an object with role and content")
        role_name = turn.get("role")
        role = OPENAI_ROLES.get(role_name) if isinstance(role_name, str) else None
        if role is None:
            from sftplay.data.sharegpt import refuse_role

            refuse_role(role_name, turn, name=place, known=OPENAI_ROLES)
        messages.append(read_message(role, turn, name=place, key="content"))
    return tuple(messages)


def prompt_turns(value: object, name: str, *, role: Role) -> tuple[Message, ...]:
    """Read a prompt or a completion: a list of messages, or a text that is one message from `role`."""
    if isinstance(value, list):
        return openai_turns(value, name)
    return (Message(role, expect_text(value, name)),)


def check_order(turns: Sequence[Message]) -> None:
    """Refuse any order but: system first if at all, user and assistant by turns, results after calls, no empty turn."""
    due: tuple[Role, ...] = ("user",)
    for place, turn in enumerate(turns, 1):
        role = turn.role
        if role == "system":
            if place > 1:
                refuse(f"message {place} is a system message; only the first may be one")
        elif role not in due:
            refuse(f"message {place} is from {role!r} where {due[0]!r} is due")
        if not turn.calls and (not turn.content or turn.content.isspace()):
            refuse(f"message {place}, from {role!r}, is empty")
        if role == "assistant":
            due = ("tool",) if turn.calls else ("user",)
        elif role != "system":
            due = ("assistant",) if role == "user" else ("assistant", "tool")


def read_message(role: Role, turn: Mapping[str, Any], *, name: str, key: str) -> Message:
    """Read a turn whose text stands under `key`."""
    if not PLAIN.issuperset(turn):
        check_keys(role, turn, name=name)
    value, calls = turn.get(key), tuple[Call, ...]()
    if not is_blank(turn.get("tool_calls")) or not is_blank(turn.get("function_call")):
        from sftplay.data.calls import read_calls

        calls = read_calls(role, turn, name=name)
    content = "" if value is None and calls else _read_content(value, f"{name}.{key}")
    if role != "tool":
        return Message(role, content, calls)
    tool, call_id = turn.get("name"), turn.get("tool_call_id")
    return Message(
        role,
        content,
        name="" if tool is None else expect_text(tool, f"{name}.name"),
        call_id="" if call_id is None else expect_text(call_id, f"{name}.tool_call_id"),
    )


def _read_content(value: object, name: str) -> str:
    """Return a text, or the texts of a list of parts put together."""
    if not isinstance(value, list):
        return expect_text(value, name)
    texts = []
    for index, part in enumerate(value):
        place = f"{name}[{index}]"
        if isinstance(part, str):
            texts.append(expect_text(part, place))
            continue
        if not isinstance(part, Mapping):
            refuse(f"{place} is {describe_type(part)}, not a part of a message")
        if part.get("type") not in ("text", "input_text", "output_text"):
            refuse(f"{place} is a part of the type {part.get('type')!r}; only text can be learned")
        texts.append(expect_text(part.get("text"), f"{place}.text"))
    return "".join(texts)


def check_keys(role: Role, turn: Mapping[str, Any], *, name: str) -> None:
    """Refuse keys that concern what is learned and would be ignored."""
    for key in UNHONOURED:
        if not is_blank(turn.get(key)):
            refuse(f"{name} has {key!r}, which is not rendered")
    learns = role == "assistant"
    for key in ("weight", "loss_weight"):
        if turn.get(key) not in ((None, 1) if learns else (None, 0, 1)):
            refuse(f"{name} has {key} {turn[key]!r}; only 1 is known")
    for key in ("train", "training", "trainable", "learn", "loss", "mask", "masked"):
        if turn.get(key) not in (None, learns != key.startswith("mask")):
            due = "always learned" if learns else "never learned"
            refuse(f"{name} has {key} {turn[key]!r}, but a turn from {role!r} is {due}")
