"""Chats of the kit's own on which a chat template is tried out before any data is.

They ask what data seldom does: equal turns, a user who types the template's own headers, calls with their results.
"""

from __future__ import annotations

import json

from sftplay.data.records import Call, Chat, Message, Source
from sftplay.data.template.templates import ChatTemplate
from sftplay.errors import DataError

OPENINGS = ("", "<think>\nWell.\n</think>\n\n")
"""What the answers begin with: a template that expects thinking cannot hold on chats without any."""

NEXT = Message("user", "Ping next?")

_PARAMETERS = {"type": "object", "properties": {"stone": {"type": "string", "description": "Its colour"}}}
_TOOL = {"name": "find_stone", "description": "Looks for a stone", "parameters": _PARAMETERS}
_TOOLS = json.dumps([{"type": "function", "function": _TOOL}])
_CALL = Call("find_stone", '{"stone": "grey slate"}', "callstone")  # nine letters: Mistral's templates insist on that


def probe_chats(template: ChatTemplate, opening: str) -> list[Chat]:
    """Chats without tools; all answers begin with `opening`."""
    words = ["Ping one?", "Pong one.", "Ping two?", "Pong two.", "Ping three?", "Pong one."]
    words = [opening + word if word.startswith("Pong") else word for word in words]
    plain = _by_turns(words)
    try:
        header = template.render(plain.messages)[0]
    except DataError:
        return [_by_turns(words[:2])]
    return [plain, _by_turns([f"Read {header} again", *words[1:4]]), _by_turns(words[:2])]


def tool_probe_chats() -> list[Chat]:
    """Chats with a call: one that goes on after it, and its beginning, which ends with the call."""
    turns = (
        Message("user", "Where is it?"),
        Message("assistant", "", (_CALL,)),
        Message("tool", "under the bridge", name=_CALL.name, call_id=_CALL.id),
        Message("assistant", "Below."),
        NEXT,
        Message("assistant", "Pong next."),
    )
    whole = Chat(turns, Source("(built-in chat with a call)", 1), tools=_TOOLS)
    return [whole, *whole.turns_apart()[:1]]


def _by_turns(words: list[str]) -> Chat:
    turns = [Message("assistant" if place % 2 else "user", text) for place, text in enumerate(words)]
    return Chat(tuple(turns), Source("(built-in chat)", 1))
