"""Whether a text that a template made holds a chat's calls, their results and the tools it may call.

Templates write these in many forms (JSON, XML, Python), so what is looked for is what all forms have in common: names
and values, in order. A template that leaves one out would teach calls that nobody made, or answers out of nowhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from sftplay.data.records import Call, Chat, Message
from sftplay.data.template.sentinels import Unproven


def uses_tools(chat: Chat) -> bool:
    """True when tools are offered, called or answered in the chat."""
    return bool(chat.tools) or any(message.calls or message.role == "tool" for message in chat.messages)


def end_of_calls(text: str, calls: Sequence[Call], *, at: int) -> int:
    """Where the last name or value of `calls` ends in `text`, looked for from `at`.

    Raises:
        Unproven: a name, a key or a value is not there.
    """
    for call in calls:
        begin = text.find(call.name, at)
        if begin < 0:
            raise Unproven(f"the template does not write the call of {call.name!r}")
        begin = at = begin + len(call.name)
        for key, value in _leaves(json.loads(call.arguments)):
            end = _end_of(text, key, value=value, begin=begin)
            if end < 0:
                raise Unproven(f"the template changes or drops {key}={value!r}, an argument of {call.name!r}")
            at = max(at, end)
    return at


def check_results(text: str, chat: Chat, *, starts: Sequence[int]) -> None:
    """Raise Unproven unless each tool's result stands in `text`, in order and before the turn that learns from it.

    `starts` are where the chat's learned turns begin.
    """
    begins = dict(zip(chat.learned_turns(), starts, strict=True))
    at = 0
    for index, message in enumerate(chat.messages):
        if message.role != "tool":
            continue
        until = next((begins[turn] for turn in sorted(begins) if turn > index), len(text))
        at = _after(text, spellings(message.content), begin=at, end=until)
        if at < 0:
            raise Unproven(f"the template changes or drops a tool's result: {message.content[:60]!r}")


def check_tools(text: str, without: str, *, tools: str) -> None:
    """Raise Unproven unless `text` names all tools where it differs from `without`, the same chat without tools."""
    start = _n_equal(text, without)
    shared = _n_equal(text[start:][::-1], without[start:][::-1])
    added = text[start : len(text) - shared]
    for tool in json.loads(tools):
        name = tool.get("function", tool).get("name", "")
        if name not in added:
            raise Unproven(f"the template does not tell the model of the tool {name!r}")


def spellings(content: str) -> Iterator[str]:
    """The ways a template may write a text: as it is, or inside JSON or Python."""
    stripped = content.strip()
    yield stripped
    yield json.dumps(stripped, ensure_ascii=False)[1:-1]
    yield json.dumps(stripped)[1:-1]
    yield repr(stripped)[1:-1]
    yield stripped.replace("\\", "\\\\").replace("\n", "\\n").replace("'", "\\'")


def has_text(text: str, message: Message) -> bool:
    """True when what the message says stands in `text`, give or take white space."""
    if message.content.strip() in text:
        return True
    squeezed = "".join(text.split())
    return any("".join(form.split()) in squeezed for form in spellings(message.content))


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Every value that holds no others, with the nearest key above it."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner, key)
    else:
        yield key, value


def _end_of(text: str, key: str, *, value: Any, begin: int) -> int:
    """Where the value ends that follows its key, or -1."""
    after = _after(text, spellings(key), begin=begin, end=len(text))
    forms = spellings(value) if isinstance(value, str) else (json.dumps(value), str(value))
    return _after(text, forms, begin=after, end=len(text)) if after >= 0 else -1


def _after(text: str, forms: Iterable[str], *, begin: int, end: int) -> int:
    """Where the first of `forms` that stands between the two places ends, or -1."""
    for form in forms:
        place = text.find(form, begin, end)
        if place >= 0:
            return place + len(form)
    return -1


def _n_equal(one: str, other: str) -> int:
    """How many characters the two texts begin with in common."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
