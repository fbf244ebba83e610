"""Turns of a conversation as files write them -> messages, and the order in which messages may follow each other.

Two spellings: OpenAI's `role` and `content`, and the sharegpt family's `from` and `value` with its many names for the
same three speakers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from sftplay.data.layouts.fields import is_blank, kind_of, list_of, listed, refuse, text_of
from sftplay.data.layouts.tool_calls import calls_of_turn, calls_of_value
from sftplay.data.records import Message, Role
from sftplay.errors import nearest_names

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
"""What a role that OpenAI's form does not know was probably meant to be."""

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
    turns = list_of(value, repr(name), of="messages")
    return tuple([_openai_turn(turn, f"{name}[{index}]") for index, turn in enumerate(turns)])


def sharegpt_turns(value: object, name: str) -> tuple[Message, ...]:
    """A list of objects with `from` and `value`, or their variants, as messages, in order."""
    turns = list_of(value, repr(name), of="turns")
    return tuple([_sharegpt_turn(turn, f"{name}[{index}]") for index, turn in enumerate(turns)])


def prompt_turns(value: object, name: str, *, role: Role) -> tuple[Message, ...]:
    """A prompt or a completion: a list of messages, or a text that is one message from `role`."""
    if isinstance(value, list):
        return openai_turns(value, name)
    return (Message(role, text_of(value, name)),)


def check_order(turns: Sequence[Message]) -> None:
    """Refuse what is not: system first if at all, user and assistant by turns, results after calls, nobody silent."""
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
        refuse(f"ends with {last} that nobody answers")


def _openai_turn(turn: object, name: str) -> Message:
    if not isinstance(turn, Mapping):
        refuse(f"{name} is {kind_of(turn)}, not an object with role and content")
    said = turn.get("role")
    role = OPENAI_ROLES.get(said) if isinstance(said, str) else None
    if role is None:
        _refuse_role(said, turn, name=name, known=OPENAI_ROLES)
    return _message(role, turn, name=name, key="content")


def _sharegpt_turn(turn: object, name: str) -> Message:
    if not isinstance(turn, Mapping):
        refuse(f"{name} is {kind_of(turn)}, not an object with from and value")
    key = next((key for key in ("value", "content", "text") if turn.get(key) is not None), "value")
    said = turn.get("from")
    said = turn.get("role") if said is None else said
    plain = said.strip().lower() if isinstance(said, str) else ""
    if plain in CALLING_ROLES:
        _check_keys("assistant", turn, name=name)
        return Message("assistant", "", calls_of_value(turn.get(key), f"{name}.{key}"))
    role = SHAREGPT_ROLES.get(plain)
    if role is None:
        _refuse_role(said, turn, name=name, known=SHAREGPT_ROLES)
    return _message(role, turn, name=name, key=key)


def _message(role: Role, turn: Mapping[str, Any], *, name: str, key: str) -> Message:
    if not PLAIN.issuperset(turn):
        _check_keys(role, turn, name=name)
    value = turn.get(key)
    if role == "assistant":
        calls = calls_of_turn(turn, name)
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
        name="" if tool is None else text_of(tool, f"{name}.name"),
        call_id="" if call_id is None else text_of(call_id, f"{name}.tool_call_id"),
    )


def _content(value: object, name: str) -> str:
    """A text, or the texts of a list of parts put together."""
    if isinstance(value, list):
        return "".join(_part(part, f"{name}[{index}]") for index, part in enumerate(value))
    return text_of(value, name)


def _part(part: object, name: str) -> str:
    if isinstance(part, str):
        return text_of(part, name)
    if not isinstance(part, Mapping):
        refuse(f"{name} is {kind_of(part)}, not a part of a message")
    kind = part.get("type")
    if kind not in TEXT_PARTS:
        refuse(f"{name} is a part of the type {kind!r}; only text can be learned")
    return text_of(part.get("text"), f"{name}.text")


def _check_keys(role: Role, turn: Mapping[str, Any], *, name: str) -> None:
    """Refuse keys that say something about what is learned and would not be followed."""
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


def _refuse_role(said: object, turn: Mapping[str, Any], *, name: str, known: Mapping[str, Role]) -> NoReturn:
    if not isinstance(said, str):
        refuse(f"{name} has no role: its keys are {listed(turn)}")
    near: str = MEANT.get(said.lower()) or "".join(nearest_names(said[:40], known)[:1])
    refuse(f"{name} has the unknown role {said[:40]!r}" + (f"; did you mean {near!r}?" if near else ""))
