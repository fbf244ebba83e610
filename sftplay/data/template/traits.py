"""Finds by trial in which form a chat template wants its chats: see `templates.TemplateTraits`.

A template does not state this. The form that transformers documents is tried first, and kept where it works.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from sftplay.data.records import Chat, Message
from sftplay.data.template.probe_chats import NEXT, tool_probe_chats
from sftplay.data.template.templates import ChatTemplate, TemplateTraits
from sftplay.errors import DataError


def content_forms(template: ChatTemplate) -> list[ChatTemplate]:
    """The template given texts, and given parts where it looks at the type of one."""
    plain = template.with_traits(replace(TemplateTraits(), arguments_as_text=_wants_text(template)))
    if not re.search(r"""['"]type['"]|\.type\b""", template.text):
        return [plain]
    return [plain, template.with_traits(replace(plain.traits, content_in_parts=True))]


def closings_of(template: ChatTemplate, chats: Sequence[Chat], *, special: Iterable[str]) -> tuple[str, str]:
    """What ends a last turn of a template without end tokens: the token that the next turn begins with, at once.

    Only a token of that turn's own will do, one with which no answer begins (GLM-4 has <|user|> and <|observation|>);
    where all turns begin alike, or white space comes first, the template has forgotten its end token.
    """
    called = tool_probe_chats()[0]
    said = next((_next_token(template, chat, following=NEXT, special=special) for chat in chats), "")
    calls = _next_token(
        template, replace(called, messages=called.messages[:2]), following=called.messages[2], special=special
    )
    return said, calls or said


def _next_token(template: ChatTemplate, chat: Chat, *, following: Message, special: Iterable[str]) -> str:
    try:
        text, _ = template.render(chat.messages, tools=chat.tools)
        longer, _ = template.render((*chat.messages, following), tools=chat.tools)
        header, _ = template.render(chat.prompt, tools=chat.tools, prompts=True)
    except DataError:
        return ""
    if not longer.startswith(text):
        return ""
    fits = [token for token in special if token and longer.startswith(token, len(text))]
    token = max(fits, key=len, default="")
    opening = header[len(template.render(chat.prompt, tools=chat.tools)[0]) :]
    return "" if not opening or token in opening else token


def _wants_text(template: ChatTemplate) -> bool:
    """True when a call is written only, or only as JSON, with its arguments as text."""
    (call,) = tool_probe_chats()[1].messages[1].calls
    as_object = _written(template)
    if as_object is not None and str(json.loads(call.arguments)) not in as_object:
        return False
    as_text = _written(template.with_traits(replace(TemplateTraits(), arguments_as_text=True)))
    return as_text is not None and call.arguments in as_text


def _written(template: ChatTemplate) -> str | None:
    chat = tool_probe_chats()[1]
    try:
        return template.render(chat.messages, tools=chat.tools)[0]
    except DataError:
        return None
