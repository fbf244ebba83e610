"""Turns as ShareGPT and its relatives write them become canonical turns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sftplay.data.calls import read_call
from sftplay.data.records import Message
from sftplay.data.row_fields import describe_type, expect_list, parse_json, refuse
from sftplay.data.turns import SHAREGPT_ROLES, check_keys, read_message, refuse_role


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
            refuse_role(role_name, turn, name=place, known=SHAREGPT_ROLES)
        else:
            messages.append(read_message(role, turn, name=place, key=key))
    return tuple(messages)


def _read_calling_turn(turn: Mapping[str, Any], name: str, *, key: str) -> Message:
    """Read a turn of the assistant that is nothing but calls: one of them or a list, mostly as JSON text."""
    check_keys("assistant", turn, name=name)
    value = turn.get(key)
    if isinstance(value, str):
        value = parse_json(value, f"{name}.{key}", due="a call")
    calls = value if isinstance(value, list | tuple) else [value]
    if not calls:
        refuse(f"{name}.{key} has no call in it")
    return Message("assistant", "", tuple(read_call(call, f"{name}.{key}[{n}]") for n, call in enumerate(calls)))
