"""Turns as OpenAI, ShareGPT and their relatives write them become canonical messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from sftplay.data.files import describe_type, expect_list, expect_text, is_blank, listed, parse_json, refuse
from sftplay.data.records import Call, Message, Role
from sftplay.errors import nearest_names

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


def refuse_role(role_name: object, turn: Mapping[str, Any], *, name: str, known: Mapping[str, Role]) -> NoReturn:
    """Refuse a role that is none of `known`, and suggest one of them."""
    if not isinstance(role_name, str):
        refuse(f"{name} has no role: its keys are {listed(turn)}")
    meant: dict[str, Role] = {**SHAREGPT_ROLES, "developer": "system", "ai": "assistant"}
    near: str = meant.get(role_name.lower()) or "".join(nearest_names(role_name[:40], known)[:1])
    refuse(f"{name} has the unknown role {role_name[:40]!r}" + (f"; did you mean {near!r}?" if near else ""))


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
    from sftplay.data.calls import read_call

    check_keys("assistant", turn, name=name)
    value = turn.get(key)
    if isinstance(value, str):
        value = parse_json(value, f"{name}.{key}", due="a call")
    calls = value if isinstance(value, list | tuple) else [value]
    if not calls:
        refuse(f"{name}.{key} has no call in it")
    return Message("assistant", "", tuple(read_call(call, f"{name}.{key}[{n}]") for n, call in enumerate(calls)))
