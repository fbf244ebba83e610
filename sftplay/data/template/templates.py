"""Chat templates: finding the one to use, and rendering it fast while watching its `{% generation %}` blocks.

A template comes with a model and is foreign code, so it runs in jinja's sandbox, in the same environment transformers
gives it. Nothing here knows tokens; which part of the text is learned is decided in `masks`. A template that prints
the date (`strftime_now`) prints that of the day on which a row is prepared, and keeps it with the prepared rows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2.ext
from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sftplay.data.records import Message
from sftplay.data.template.chatml import CHATML as CHATML
from sftplay.data.template.time_limit import limited, tick
from sftplay.errors import DataError

Span = tuple[int, int]
"""A half-open range of characters."""

OPEN, CLOSE = "\ufdd0", "\ufdd1"
"""Put around generation blocks while rendering: noncharacters, which Unicode keeps for a program's own use.
`typed_specials` refuses a record that holds them."""

FAULTS = (
    TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError
)  # fmt: skip
"""What a template may raise on a chat it was not made for."""


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """The form in which a template wants its chats, found by trial (see `traits`): a template does not state it."""

    arguments_as_text: bool = False
    """A call's arguments are wanted as JSON text; transformers documents an object."""

    content_in_parts: bool = False
    """What a turn says is wanted as a list with one part of type text."""

    closings: tuple[str, str] = ("", "")
    """What ends a last turn that says something, and one that calls, where the template writes no end token: the token
    that begins the next turn, at which such a model is made to stop."""


PLAIN = TemplateTraits()


def resolve_template(setting: str, tokenizer: Any) -> str:
    """The text of the template that `data.template` names: auto, chatml, or the path of a Jinja file.

    Raises:
        DataError: the tokenizer has no template, lacks ChatML's tokens, or there is no such file.
    """
    if setting == "auto":
        return _own_template(tokenizer)
    if setting == "chatml":
        _expect_chatml_tokens(tokenizer)
        return CHATML
    path = Path(setting)
    if not path.is_file():
        fix = "give auto, chatml or the path of a Jinja file"
        raise DataError(f"there is no file {setting!r}", where="data.template", fix=fix)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        what = f"{setting!r} cannot be read as UTF-8: {error}"
        raise DataError(what, where="data.template", fix="save it as UTF-8, readable to you") from error


def template_hash(template: str) -> str:
    """Hex sha256 of the template's text."""
    return hashlib.sha256(template.encode()).hexdigest()


def _own_template(tokenizer: Any) -> str:
    template = tokenizer.chat_template
    if isinstance(template, Mapping):  # several named templates; transformers calls the plain one "default"
        template = template.get("default")
    if not template:
        fix = "set data.template: chatml, or the path of a Jinja file"
        raise DataError("the model's tokenizer has no chat template", where="data.template", fix=fix)
    return str(template)


def _expect_chatml_tokens(tokenizer: Any) -> None:
    for token in ("<|im_start|>", "<|im_end|>"):
        ids = tokenizer.backend_tokenizer.encode(token, add_special_tokens=False).ids
        if len(ids) != 1:
            raise DataError(
                f"{token} is not a single token of this tokenizer but {len(ids)}: no model learns to stop at that",
                where="data.template",
                fix="use the model's own template (auto) or the path of a Jinja file made of its tokens",
            )


class GenerationBlocks(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}`: transformers' mark around what the assistant says."""

    tags = {"generation"}  # noqa: RUF012 - declared by jinja

    def parse(self, parser: Parser) -> nodes.Node:
        """Turn the block into a call that puts OPEN and CLOSE around its text."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Macro) -> str:
        return f"{OPEN}{caller()}{CLOSE}"


class ChatTemplate:
    """One compiled template. `tokens` are the special tokens it may name, such as `eos_token`."""

    def __init__(self, text: str, tokens: Mapping[str, Any], *, traits: TemplateTraits = PLAIN) -> None:
        self.text, self.traits = text, traits
        self._is_plain = not (traits.arguments_as_text or traits.content_in_parts)
        self._tokens = dict(tokens)
        try:
            self._template = _environment().from_string(text)
        except TemplateSyntaxError as error:
            where = f"data.template, line {error.lineno}"
            raise DataError(f"is not a Jinja template: {error.message}", where=where, fix="correct it there") from error
        self.has_marks = "endgeneration" in text

    def render(self, messages: Sequence[Message], *, tools: str = "", prompts: bool = False) -> tuple[str, list[Span]]:
        """The chat as text, and where the generation blocks lie in it; with `prompts`, the header of an answer added.

        Raises:
            DataError: the template refuses this chat; `what` is its own reason.
        """
        try:
            given = {
                **self._tokens,
                "messages": [self._turn(message) for message in messages],
                "tools": json.loads(tools) if tools else None,
                "documents": None,
                "add_generation_prompt": prompts,
            }
            # What Template.render does, without its rewriting of tracebacks.
            with limited():
                text = "".join(self._template.root_render_func(self._template.new_context(given)))
        except FAULTS as error:
            raise DataError(f"the chat template refuses it: {error}") from error
        if not prompts and messages[-1].role == "assistant":
            text += self.traits.closings[bool(messages[-1].calls)]
        return _without_marks(text) if self.has_marks else (text, [])

    def with_traits(self, traits: TemplateTraits) -> ChatTemplate:
        """The same template, given chats as `traits` say."""
        return ChatTemplate(self.text, self._tokens, traits=traits)

    def _turn(self, message: Message) -> dict[str, Any]:
        turn = message.as_json()
        if self._is_plain:
            return turn
        if self.traits.arguments_as_text:
            for call, written in zip(message.calls, turn.get("tool_calls", ()), strict=True):
                written["function"]["arguments"] = call.arguments
        if self.traits.content_in_parts:
            turn["content"] = [{"type": "text", "text": message.content}]
        return turn


def _without_marks(text: str) -> tuple[str, list[Span]]:
    first, *others = text.split(OPEN)
    plain, spans, at = [first], [], len(first)
    for part in others:
        inside, _, after = part.partition(CLOSE)
        spans.append((at, at + len(inside)))
        at += len(inside) + len(after)
        plain += (inside, after)
    return "".join(plain), spans


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox in which loops and macros end when their time is used."""

    tick = staticmethod(tick)

    def _parse(self, source: str, *place: Any) -> nodes.Template:
        tree = super()._parse(source, *place)
        bodies: list[Any] = [*tree.find_all(nodes.For), *tree.find_all(nodes.Macro)]
        for node in bodies:
            call = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(call).set_lineno(node.lineno))
        return tree.set_environment(self)  # type: ignore[return-value]


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment of transformers/utils/chat_template_utils.py, so that every template means the same here."""
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, **form: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **form)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
