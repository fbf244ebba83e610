"""Functions that an assistant calls: the tools of a row, its calls, and the results tied to them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from sftplay.data.files import describe_type, expect_list, expect_text, is_blank, listed, parse_json, refuse
from sftplay.data.records import Call, Message, Role

DEEPEST = 100
"""Most levels inside a call's arguments or a tool: deeper ones could not be handed from process to process."""


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


def tools_text(value: object) -> str:
    """Return a `tools` column, a list or its JSON text, as the JSON text of a list in OpenAI's form."""
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


def read_calls(role: Role, turn: Mapping[str, Any], *, name: str) -> tuple[Call, ...]:
    """Read the calls of a message that has `tool_calls`, or `function_call`, which came first in OpenAI's history."""
    several, one = turn.get("tool_calls"), turn.get("function_call")
    if role != "assistant":
        called = "function_call" if is_blank(several) else "tool_calls"
        refuse(f"{name} has {called!r}, but only the assistant calls functions")
    if is_blank(several):
        return (read_call(one, f"{name}.function_call"),)
    if not is_blank(one):
        refuse(f"{name} has both 'tool_calls' and 'function_call'")
    given = expect_list(several, f"{name}.tool_calls", of="calls")
    return tuple(read_call(call, f"{name}.tool_calls[{index}]") for index, call in enumerate(given))


def read_call(value: object, name: str) -> Call:
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
