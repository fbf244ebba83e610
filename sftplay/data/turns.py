"""Turns of a chat in the spellings of other kits become canonical turns; JSON with repeated keys and odd numbers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, NoReturn

from sftplay.data.records import Call, Message, Role
from sftplay.errors import DataError, nearest_names

BROKEN_JSON = (ValueError, RecursionError)
"""Errors that decoding raises: RecursionError for nesting deeper than the interpreter's stack."""

DEEPEST = 100
"""Most levels inside a call's arguments or a tool: deeper ones could not be handed from process to process."""


def decode_json(text: str) -> Any:
    """Return the value; a repeated key in one object is an error, since json would keep only the last."""
    return _DECODER.decode(text)


def encode_json(value: Any) -> str:
    """Return the value as text, letters kept as they are.
    Raise ValueError where JSON has no form for it: a number out of range, a character that is none, or too many levels.
    """
    level: Sequence[Any] = [value]
    for depth in range(DEEPEST + 2):  # level by level, because recursion is what this guards against
        if not level:
            break
        if depth > DEEPEST:
            raise ValueError(f"has more than {DEEPEST} levels")
        objects = [outer for outer in level if isinstance(outer, dict | list)]
        level = [inner for outer in objects for inner in (outer.values() if isinstance(outer, dict) else outer)]
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError("holds something that is not valid Unicode") from error
    except TypeError as error:
        raise ValueError(f"holds something that JSON cannot: {error}") from error
    return text


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


def tools_text(value: object) -> str:
    """Return a `tools` column, a list or its JSON text, as the JSON text of a list in OpenAI's form; empty for none."""
    if is_blank(value):
        return ""
    tools = []
    for index, tool in enumerate(expect_list(value, "'tools'", of="functions")):
        name = f"tools[{index}]"
        if not isinstance(tool, dict):
            refuse(f"{name} is {describe_type(tool)}, not the description of a function")
        if tool.get("type") not in (None, "function"):
            refuse(f"{name} is a tool of the type {tool['type']!r}; only functions are known")
        inner = tool.get("function") or {key: tool[key] for key in tool if key != "type"}
        if not isinstance(inner, dict):
            refuse(f"{name}.function is {describe_type(inner)}, not the description of a function")
        _expect_name(inner, name)
        tools.append({"type": "function", "function": inner})
    return _encode(tools, "'tools'") if tools else ""


def tie_results(turns: Sequence[Message]) -> tuple[Message, ...]:
    """Return the turns with an id on every call, and on every result the id and name of the call it answers.

    Results without an id answer the calls before them in order. Ids that are missing are made of nine letters and
    digits, the only form that every template takes (Mistral's refuses others).
    """
    if not any(turn.calls or turn.role == "tool" for turn in turns):
        return tuple(turns)
    taken = {call.id for turn in turns for call in turn.calls}
    unused_ids = (name for number in count(1) if (name := f"call{number:05}") not in taken)
    tied: list[Message] = []
    waiting: dict[str, str] = {}
    for place, turn in enumerate(turns, 1):
        if turn.role == "tool":
            if not waiting:
                refuse(f"message {place} is from 'tool', but no call before it waits for a result")
            call_id = turn.call_id or next(iter(waiting))
            if call_id not in waiting:
                refuse(f"message {place} answers the call {call_id[:40]!r}; those that wait are {listed(waiting)}")
            called = waiting.pop(call_id)
            turn = replace(turn, call_id=call_id, name=turn.name or called)
        elif turn.calls:
            calls = tuple(call if call.id else replace(call, id=next(unused_ids)) for call in turn.calls)
            turn, waiting = replace(turn, calls=calls), {call.id: call.name for call in calls}
            if len(waiting) < len(calls):
                refuse(f"message {place} has two calls with one id")
        else:
            waiting = {}
        tied.append(turn)
    return tuple(tied)


def _read_call(value: object, name: str) -> Call:
    if not isinstance(value, Mapping):
        refuse(f"{name} is {describe_type(value)}, not a call with name and arguments")
    kind = value.get("type")
    if kind not in (None, "", "function"):
        refuse(f"{name} is a call of the type {kind!r}; only functions are known")
    inner = value.get("function", value)
    if not isinstance(inner, Mapping):
        refuse(f"{name}.function is {describe_type(inner)}, not an object with name and arguments")
    given = value.get("id")
    call_id = "" if given is None else expect_text(given, f"{name}.id")
    called, arguments = _expect_name(inner, name), inner.get("arguments")
    if is_blank(arguments):
        return Call(called, "{}", call_id)
    if isinstance(arguments, str):
        arguments = parse_json(arguments, f"{name}.arguments", due="an object")
    if not isinstance(arguments, dict):
        refuse(f"{name}.arguments is {describe_type(arguments)}, not an object")
    return Call(called, _encode(arguments, f"{name}.arguments"), call_id)


def _expect_name(value: Mapping[str, Any], name: str) -> str:
    if "name" not in value:
        refuse(f"{name} names no function: its keys are {listed(value)}")
    found = expect_text(value["name"], f"{name}.name")
    if not found.strip():
        refuse(f"{name}.name is empty")
    return found


def _encode(value: object, name: str) -> str:
    try:
        return encode_json(value)
    except ValueError as error:
        refuse(f"{name} {str(error) if str(error).startswith(('has', 'holds')) else f'cannot be written: {error}'}")


OPENAI_ROLES: dict[str, Role] = {
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    **dict.fromkeys(("tool", "function"), "tool"),
}
SHAREGPT_ROLES: dict[str, Role] = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "bot", "model"), "assistant"),
    **dict.fromkeys(("observation", "tool", "function", "function_response", "tool_response", "ipython"), "tool"),
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
            _refuse_role(role_name, turn, name=place, known=OPENAI_ROLES)
        messages.append(_read_message(role, turn, name=place, key="content"))
    return tuple(messages)


def sharegpt_turns(value: object, name: str) -> tuple[Message, ...]:
    """Read a list of objects with `from` and `value`, or their variants, as messages, in order."""
    messages = []
    for index, turn in enumerate(expect_list(value, repr(name), of="turns")):
        place = f"{name}[{index}]"
        if not isinstance(turn, Mapping):
            refuse(f"{place} is {describe_type(turn)}, not an object with from and value")
        key = next((key for key in ("value", "content", "text") if turn.get(key) is not None), "value")
        role_name = turn.get("from")
        role_name = turn.get("role") if role_name is None else role_name
        plain = role_name.strip().lower() if isinstance(role_name, str) else ""
        role = SHAREGPT_ROLES.get(plain)
        if plain in ("function_call", "tool_call"):
            messages.append(_read_calling_turn(turn, place, key=key))
        elif role is None:
            _refuse_role(role_name, turn, name=place, known=SHAREGPT_ROLES)
        else:
            messages.append(_read_message(role, turn, name=place, key=key))
    return tuple(messages)


def _read_calling_turn(turn: Mapping[str, Any], name: str, *, key: str) -> Message:
    """Read a turn of the assistant that is nothing but calls: one of them or a list, mostly as JSON text."""
    _check_keys("assistant", turn, name=name)
    value = turn.get(key)
    if isinstance(value, str):
        value = parse_json(value, f"{name}.{key}", due="a call")
    calls = value if isinstance(value, list | tuple) else [value]
    if not calls:
        refuse(f"{name}.{key} has no call in it")
    return Message("assistant", "", tuple(_read_call(call, f"{name}.{key}[{n}]") for n, call in enumerate(calls)))


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


def _read_message(role: Role, turn: Mapping[str, Any], *, name: str, key: str) -> Message:
    if not PLAIN.issuperset(turn):
        _check_keys(role, turn, name=name)
    # `function_call` came before `tool_calls` in OpenAI's history.
    value, several, one = turn.get(key), turn.get("tool_calls"), turn.get("function_call")
    calls: tuple[Call, ...] = ()
    if not is_blank(several) or not is_blank(one):
        if role != "assistant":
            called = "function_call" if is_blank(several) else "tool_calls"
            refuse(f"{name} has {called!r}, but only the assistant calls functions")
        if is_blank(several):
            calls = (_read_call(one, f"{name}.function_call"),)
        elif not is_blank(one):
            refuse(f"{name} has both 'tool_calls' and 'function_call'")
        else:
            given = expect_list(several, f"{name}.tool_calls", of="calls")
            calls = tuple(_read_call(call, f"{name}.tool_calls[{index}]") for index, call in enumerate(given))
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


def _check_keys(role: Role, turn: Mapping[str, Any], *, name: str) -> None:
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


def _refuse_role(role_name: object, turn: Mapping[str, Any], *, name: str, known: Mapping[str, Role]) -> NoReturn:
    if not isinstance(role_name, str):
        refuse(f"{name} has no role: its keys are {listed(turn)}")
    meant: dict[str, Role] = {**SHAREGPT_ROLES, "developer": "system", "ai": "assistant"}
    near: str = meant.get(role_name.lower()) or "".join(nearest_names(role_name[:40], known)[:1])
    refuse(f"{name} has the unknown role {role_name[:40]!r}" + (f"; did you mean {near!r}?" if near else ""))
