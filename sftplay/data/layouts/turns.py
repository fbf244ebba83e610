"""Read the turns of a chat, with their tool calls, in the known layouts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from sftplay.data.json_text import BROKEN_JSON, decode_json, describe_json_error, encode_json
from sftplay.data.records import Call, Message, Role
from sftplay.errors import DataError, nearest_names

RowFields = Mapping[str, Any]

FIX_ROW = "correct the row, or leave such rows out with data.on_bad_row: skip"


def refuse(what: str, fix: str = FIX_ROW) -> NoReturn:
    """Raise the DataError that `convert` completes with file and line."""
    raise DataError(what, fix=fix)


def describe_type(value: object) -> str:
    """A json value's type in words, for messages."""
    if value is None:
        return "null"
    kinds = {bool: "a boolean", int: "a number", float: "a number", str: "a text", list: "a list", dict: "an object"}
    return kinds.get(type(value), f"a {type(value).__name__}")


def listed(names: Iterable[object]) -> str:
    """Up to eight of the names, quoted."""
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
    """A `tools` column, a list or its JSON text, as the JSON text of a list in OpenAI's form; empty for none."""
    if is_blank(value):
        return ""
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(expect_list(value, "'tools'", of="functions"))]
    return _encoded(tools, "'tools'") if tools else ""


def parse_turn_calls(turn: Mapping[str, Any], name: str) -> tuple[Call, ...]:
    """The calls in a message's `tool_calls`, or in the `function_call` that came before it in OpenAI's history."""
    several, one = turn.get("tool_calls"), turn.get("function_call")
    if not is_blank(several) and not is_blank(one):
        refuse(f"{name} has both 'tool_calls' and 'function_call'")
    if not is_blank(several):
        calls = expect_list(several, f"{name}.tool_calls", of="calls")
        return tuple(_call(call, f"{name}.tool_calls[{index}]") for index, call in enumerate(calls))
    return () if is_blank(one) else (_call(one, f"{name}.function_call"),)


def parse_calls(value: object, name: str) -> tuple[Call, ...]:
    """The calls in a turn that is nothing but calls: one of them or a list, mostly as JSON text."""
    if isinstance(value, str):
        value = parse_json(value, name, due="a call")
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
        refuse(f"{name} is {describe_type(value)}, not a call with name and arguments")
    kind = value.get("type")
    if kind not in (None, "", "function"):
        refuse(f"{name} is a call of the type {kind!r}; only functions are known")
    inner = value.get("function", value)
    if not isinstance(inner, Mapping):
        refuse(f"{name}.function is {describe_type(inner)}, not an object with name and arguments")
    given = value.get("id")
    call_id = "" if given is None else expect_text(given, f"{name}.id")
    return Call(_expect_name(inner, name), _arguments(inner.get("arguments"), f"{name}.arguments"), call_id)


def _expect_name(value: Mapping[str, Any], name: str) -> str:
    if "name" not in value:
        refuse(f"{name} names no function: its keys are {listed(value)}")
    found = expect_text(value["name"], f"{name}.name")
    if not found.strip():
        refuse(f"{name}.name is empty")
    return found


def _arguments(value: object, name: str) -> str:
    if is_blank(value):
        return "{}"
    if isinstance(value, str):
        value = parse_json(value, name, due="an object")
    if not isinstance(value, dict):
        refuse(f"{name} is {describe_type(value)}, not an object")
    return _encoded(value, name)


def _tool(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        refuse(f"{name} is {describe_type(value)}, not the description of a function")
    if value.get("type") not in (None, "function"):
        refuse(f"{name} is a tool of the type {value['type']!r}; only functions are known")
    inner = value.get("function") or {key: value[key] for key in value if key != "type"}
    if not isinstance(inner, dict):
        refuse(f"{name}.function is {describe_type(inner)}, not the description of a function")
    _expect_name(inner, name)
    return {"type": "function", "function": inner}


def _encoded(value: object, name: str) -> str:
    try:
        return encode_json(value)
    except ValueError as error:
        refuse(f"{name} {str(error) if str(error).startswith(('has', 'holds')) else f'cannot be written: {error}'}")


OPENAI_ROLES: dict[str, Role] = {
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
SHAREGPT_ROLES: dict[str, Role] = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "bot", "model"), "assistant"),
    **dict.fromkeys(("observation", "tool", "function", "function_response", "tool_response", "ipython"), "tool"),
}
CALLING_ROLES = ("function_call", "tool_call")
"""A sharegpt turn of such a role is the assistant's, and its value is the JSON text of one call or of several."""

MEANT: dict[str, Role] = {**SHAREGPT_ROLES, "developer": "system", "ai": "assistant"}
"""Suggestions for roles that OpenAI's form does not know."""

PLAIN = {"role", "content", "from", "value", "text", "name", "id", "tool_calls", "function_call", "tool_call_id"}
UNHONOURED = (
    *("reasoning_content", "reasoning", "thinking", "thought", "thoughts"),
    *("refusal", "audio", "images", "image", "videos", "train_detail"),
)
"""Keys of a message that would change what is learned and that are not rendered; ignoring them would be silent."""

WEIGHTS = ("weight", "loss_weight")
LEARNS = ("train", "training", "trainable", "learn", "loss")
HIDES = ("mask", "masked")

TEXT_PARTS = ("text", "input_text", "output_text")


def openai_turns(value: object, name: str) -> tuple[Message, ...]:
    """A list of objects with `role` and `content` as messages, in order."""
    turns = expect_list(value, repr(name), of="messages")
    return tuple([_openai_turn(turn, f"{name}[{index}]") for index, turn in enumerate(turns)])


def sharegpt_turns(value: object, name: str) -> tuple[Message, ...]:
    """A list of objects with `from` and `value`, or their variants, as messages, in order."""
    turns = expect_list(value, repr(name), of="turns")
    return tuple([_sharegpt_turn(turn, f"{name}[{index}]") for index, turn in enumerate(turns)])


def prompt_turns(value: object, name: str, *, role: Role) -> tuple[Message, ...]:
    """A prompt or a completion: a list of messages, or a text that is one message from `role`."""
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


def check_answered(turns: Sequence[Message]) -> None:
    """Refuse turns that do not end with the assistant."""
    if not any(turn.role == "assistant" for turn in turns):
        refuse("has no assistant turn, so there is nothing to learn")
    if turns[-1].role != "assistant":
        last = "a tool's result" if turns[-1].role == "tool" else "a user turn"
        refuse(f"ends with {last} that has no answer")


def _openai_turn(turn: object, name: str) -> Message:
    if not isinstance(turn, Mapping):
        refuse(f"{name} is {describe_type(turn)}, not an object with role and content")
    role_name = turn.get("role")
    role = OPENAI_ROLES.get(role_name) if isinstance(role_name, str) else None
    if role is None:
        _refuse_role(role_name, turn, name=name, known=OPENAI_ROLES)
    return _message(role, turn, name=name, key="content")


def _sharegpt_turn(turn: object, name: str) -> Message:
    if not isinstance(turn, Mapping):
        refuse(f"{name} is {describe_type(turn)}, not an object with from and value")
    key = next((key for key in ("value", "content", "text") if turn.get(key) is not None), "value")
    role_name = turn.get("from")
    role_name = turn.get("role") if role_name is None else role_name
    plain = role_name.strip().lower() if isinstance(role_name, str) else ""
    if plain in CALLING_ROLES:
        _check_keys("assistant", turn, name=name)
        return Message("assistant", "", parse_calls(turn.get(key), f"{name}.{key}"))
    role = SHAREGPT_ROLES.get(plain)
    if role is None:
        _refuse_role(role_name, turn, name=name, known=SHAREGPT_ROLES)
    return _message(role, turn, name=name, key=key)


def _message(role: Role, turn: Mapping[str, Any], *, name: str, key: str) -> Message:
    if not PLAIN.issuperset(turn):
        _check_keys(role, turn, name=name)
    value = turn.get(key)
    if role == "assistant":
        calls = parse_turn_calls(turn, name)
        return Message(role, "" if value is None and calls else _content(value, f"{name}.{key}"), calls)
    for called in ("tool_calls", "function_call"):
        if not is_blank(turn.get(called)):
            refuse(f"{name} has {called!r}, but only the assistant calls functions")
    content = _content(value, f"{name}.{key}")
    if role != "tool":
        return Message(role, content)
    tool, call_id = turn.get("name"), turn.get("tool_call_id")
    return Message(
        role,
        content,
        name="" if tool is None else expect_text(tool, f"{name}.name"),
        call_id="" if call_id is None else expect_text(call_id, f"{name}.tool_call_id"),
    )


def _content(value: object, name: str) -> str:
    """A text, or the texts of a list of parts put together."""
    if isinstance(value, list):
        return "".join(_part(part, f"{name}[{index}]") for index, part in enumerate(value))
    return expect_text(value, name)


def _part(part: object, name: str) -> str:
    if isinstance(part, str):
        return expect_text(part, name)
    if not isinstance(part, Mapping):
        refuse(f"{name} is {describe_type(part)}, not a part of a message")
    kind = part.get("type")
    if kind not in TEXT_PARTS:
        refuse(f"{name} is a part of the type {kind!r}; only text can be learned")
    return expect_text(part.get("text"), f"{name}.text")


def _check_keys(role: Role, turn: Mapping[str, Any], *, name: str) -> None:
    """Refuse keys that concern what is learned and would be ignored."""
    for key in UNHONOURED:
        if not is_blank(turn.get(key)):
            refuse(f"{name} has {key!r}, which is not rendered")
    learns = role == "assistant"
    for key in WEIGHTS:
        if turn.get(key) not in ((None, 1) if learns else (None, 0, 1)):
            refuse(f"{name} has {key} {turn[key]!r}; only 1 is known")
    for keys, expected in ((LEARNS, learns), (HIDES, not learns)):
        for key in keys:
            if turn.get(key) not in (None, expected):
                due = "always learned" if learns else "never learned"
                refuse(f"{name} has {key} {turn[key]!r}, but a turn from {role!r} is {due}")


def _refuse_role(role_name: object, turn: Mapping[str, Any], *, name: str, known: Mapping[str, Role]) -> NoReturn:
    if not isinstance(role_name, str):
        refuse(f"{name} has no role: its keys are {listed(turn)}")
    near: str = MEANT.get(role_name.lower()) or "".join(nearest_names(role_name[:40], known)[:1])
    refuse(f"{name} has the unknown role {role_name[:40]!r}" + (f"; did you mean {near!r}?" if near else ""))
