"""Function calls, their results and the tools they name, from the forms in which they are written down.

OpenAI's form is the canonical one; ids are kept where they are given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sftplay.data.json_text import encode_json
from sftplay.data.layouts.fields import is_blank, json_of, kind_of, list_of, listed, refuse, text_of
from sftplay.data.records import Call, Message


def tools_text(value: object) -> str:
    """A `tools` column, a list or its JSON text, as the JSON text of a list in OpenAI's form; empty for none."""
    if is_blank(value):
        return ""
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(list_of(value, "'tools'", of="functions"))]
    return _encoded(tools, "'tools'") if tools else ""


def calls_of_turn(turn: Mapping[str, Any], name: str) -> tuple[Call, ...]:
    """The calls in a message's `tool_calls`, or in the `function_call` that came before it in OpenAI's history."""
    several, one = turn.get("tool_calls"), turn.get("function_call")
    if not is_blank(several) and not is_blank(one):
        refuse(f"{name} has both 'tool_calls' and 'function_call'")
    if not is_blank(several):
        calls = list_of(several, f"{name}.tool_calls", of="calls")
        return tuple(_call(call, f"{name}.tool_calls[{index}]") for index, call in enumerate(calls))
    return () if is_blank(one) else (_call(one, f"{name}.function_call"),)


def calls_of_value(value: object, name: str) -> tuple[Call, ...]:
    """The calls in a turn that is nothing but calls: one of them or a list, mostly as JSON text."""
    if isinstance(value, str):
        value = json_of(value, name, due="a call")
    calls = value if isinstance(value, list | tuple) else [value]
    if not calls:
        refuse(f"{name} has no call in it")
    return tuple(_call(call, f"{name}[{index}]") for index, call in enumerate(calls))


def tie_results(turns: Sequence[Message]) -> tuple[Message, ...]:
    """The turns with an id on every call, and on every result the id and name of the call it answers.

    Results without an id answer the calls before them in order. Ids that are missing are made of nine letters and
    digits, the only form that every template takes (Mistral's refuses others).
    """
    if not any(turn.calls or turn.role == "tool" for turn in turns):
        return tuple(turns)
    taken = {call.id for turn in turns for call in turn.calls}
    fresh = _fresh_ids(taken)
    tied: list[Message] = []
    waiting: dict[str, str] = {}
    for place, turn in enumerate(turns, 1):
        if turn.role == "tool":
            turn = _tied(turn, waiting, place=place)
        elif turn.calls:
            calls = tuple(call if call.id else replace(call, id=next(fresh)) for call in turn.calls)
            turn, waiting = replace(turn, calls=calls), {call.id: call.name for call in calls}
            if len(waiting) < len(calls):
                refuse(f"message {place} has two calls with one id")
        else:
            waiting = {}
        tied.append(turn)
    return tuple(tied)


def _tied(result: Message, waiting: dict[str, str], *, place: int) -> Message:
    """The result with the id of its call, which then waits no longer."""
    if not waiting:
        refuse(f"message {place} is from 'tool', but no call before it waits for a result")
    call_id = result.call_id or next(iter(waiting))
    if call_id not in waiting:
        refuse(f"message {place} answers the call {call_id[:40]!r}; those that wait are {listed(waiting)}")
    called = waiting.pop(call_id)
    return replace(result, call_id=call_id, name=result.name or called)


def _fresh_ids(taken: set[str]) -> Iterator[str]:
    number = 0
    while True:
        number += 1
        if (name := f"call{number:05}") not in taken:
            yield name


def _call(value: object, name: str) -> Call:
    if not isinstance(value, Mapping):
        refuse(f"{name} is {kind_of(value)}, not a call with name and arguments")
    kind = value.get("type")
    if kind not in (None, "", "function"):
        refuse(f"{name} is a call of the type {kind!r}; only functions are known")
    inner = value.get("function", value)
    if not isinstance(inner, Mapping):
        refuse(f"{name}.function is {kind_of(inner)}, not an object with name and arguments")
    given = value.get("id")
    call_id = "" if given is None else text_of(given, f"{name}.id")
    return Call(_name_of(inner, name), _arguments(inner.get("arguments"), f"{name}.arguments"), call_id)


def _name_of(value: Mapping[str, Any], name: str) -> str:
    if "name" not in value:
        refuse(f"{name} names no function: its keys are {listed(value)}")
    found = text_of(value["name"], f"{name}.name")
    if not found.strip():
        refuse(f"{name}.name is empty")
    return found


def _arguments(value: object, name: str) -> str:
    if is_blank(value):
        return "{}"
    if isinstance(value, str):
        value = json_of(value, name, due="an object")
    if not isinstance(value, dict):
        refuse(f"{name} is {kind_of(value)}, not an object")
    return _encoded(value, name)


def _tool(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        refuse(f"{name} is {kind_of(value)}, not the description of a function")
    if value.get("type") not in (None, "function"):
        refuse(f"{name} is a tool of the type {value['type']!r}; only functions are known")
    inner = value.get("function") or {key: value[key] for key in value if key != "type"}
    if not isinstance(inner, dict):
        refuse(f"{name}.function is {kind_of(inner)}, not the description of a function")
    _name_of(inner, name)
    return {"type": "function", "function": inner}


def _encoded(value: object, name: str) -> str:
    try:
        return encode_json(value)
    except ValueError as error:
        refuse(f"{name} {str(error) if str(error).startswith(('has', 'holds')) else f'cannot be written: {error}'}")
