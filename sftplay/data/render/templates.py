"""Chat templates: compiled, checked, and rendered within a time limit."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2.ext
from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sftplay.data.records import Call, Chat, Message, Source
from sftplay.errors import DataError

ROW_S = 20.0
"""Processor seconds that rendering one row, or proving a template, may take. A usual row takes a millisecond."""

TICKS = 64  # the clock is read once in this many passes of a loop: reading it takes as long as a short pass


class _Clock(threading.local):
    deadline = 0.0  # in the thread's processor time; 0 while nothing is limited
    n_ticks = 0


_clock = _Clock()


@contextmanager
def limited() -> Iterator[None]:
    """Make `tick` raise inside the block once ROW_S seconds are used. An outer limit stays in force.
    Raise DataError where the time is used.
    """
    if _clock.deadline:
        check()
        yield
        return
    _clock.deadline = time.thread_time() + ROW_S
    try:
        yield
    finally:
        _clock.deadline = 0.0


def tick() -> None:
    """Called in each pass of a template's loops and in each call of its macros."""
    _clock.n_ticks += 1
    if not _clock.n_ticks % TICKS:
        check()


def is_used() -> bool:
    """Return True if the time of the limit around this is used."""
    return _clock.deadline > 0 and time.thread_time() > _clock.deadline


def check() -> None:
    """Raise the DataError that ends the work on a row after its time is used."""
    if is_used():
        what = f"takes the chat template longer than {ROW_S:g} s"
        raise DataError(what, fix="cut the row into shorter ones, or leave it out with data.on_bad_row: skip")


_TOOLS_TEXT = (
    "{% if tools %}{{ '<|im_start|>system\\n' }}"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\\n\\n' }}{% endif %}"
    "{{ '# Tools\\n\\nThese functions can be called:\\n<tools>' }}"
    "{% for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}"
    "{{ '\\n</tools>\\n\\nTo call one, write its name and its arguments as one JSON object between these tags:\\n"
    '<tool_call>\\n{"name": NAME, "arguments": {...}}\\n</tool_call><|im_end|>\\n\' }}'
    "{% endif %}"
)
_ANSWER = (
    "{{ '<|im_start|>assistant\\n' }}{% generation %}{{ message['content'] }}"
    "{% if 'tool_calls' in message and message['tool_calls'] %}"
    "{% for call in message['tool_calls'] %}"
    "{% if message['content'] or not loop.first %}{{ '\\n' }}{% endif %}"
    "{{ '<tool_call>\\n{\"name\": ' + (call['function']['name'] | tojson) + ', \"arguments\": ' }}"
    "{% if call['function']['arguments'] is string %}{{ call['function']['arguments'] }}"
    "{% else %}{{ call['function']['arguments'] | tojson }}{% endif %}"
    "{{ '}\\n</tool_call>' }}{% endfor %}{% endif %}{{ '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
)
_RESULT = (
    "{% if loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\\n<tool_response>\\n' + message['content'] + '\\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"
)

CHATML = (
    f"{_TOOLS_TEXT}{{% for message in messages %}}"
    f"{{% if message['role'] == 'assistant' %}}{_ANSWER}"
    f"{{% elif message['role'] == 'tool' %}}{_RESULT}"
    "{% elif message['role'] not in ['system', 'user'] %}{{ raise_exception('unknown role: ' + message['role']) }}"
    "{% elif not tools or not loop.first or message['role'] != 'system' %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""The template behind `data.template: chatml`."""


Span = tuple[int, int]  # a half-open range of characters
OPEN, CLOSE = "\ufdd0", "\ufdd1"
"""Put around generation blocks while rendering: noncharacters, which Unicode keeps for a program's own use.
`escape_special_tokens` refuses a record that holds them."""

FAULTS = (
    TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError
)  # fmt: skip
"""Errors that a template may raise on a chat it was not made for."""


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """The form in which a template wants its chats, found by trial (see `traits`): a template does not state it."""

    arguments_as_text: bool = False  # a call's arguments are wanted as JSON text; transformers documents an object
    content_in_parts: bool = False  # the template wants the content of a turn as a list with one part of type text
    closings: tuple[str, str] = ("", "")
    """The text that ends a last turn with text, and one with calls, where the template writes no end token: the token
    that begins the next turn, at which such a model is made to stop."""


PLAIN = TemplateTraits()


def resolve_template(setting: str, tokenizer: Any) -> str:
    """Return the text of the template that `data.template` names: auto, chatml, or the path of a Jinja file.
    Raise DataError where the tokenizer has no template, lacks ChatML's tokens, or there is no such file.
    """
    template = tokenizer.chat_template
    if isinstance(template, Mapping):  # several named templates; transformers calls the plain one "default"
        template = template.get("default")
    if setting == "auto" and template:
        return str(template)
    if setting in ("auto", "chatml"):
        encode = tokenizer.backend_tokenizer.encode
        counts = {token: len(encode(token, add_special_tokens=False).ids) for token in ("<|im_start|>", "<|im_end|>")}
        lacking = [token for token, n_ids in counts.items() if n_ids != 1]
        jinja_file = "the path of a Jinja file made of its tokens (configs/templates/alpaca.jinja is one)"
        if setting == "auto":
            fix = f"set data.template: {jinja_file if lacking else 'chatml, or the path of a Jinja file'}"
            raise DataError("the model's tokenizer has no chat template", where="data.template", fix=fix)
        if lacking:
            what = f"{lacking[0]} is not a single token of this tokenizer but {counts[lacking[0]]}"
            fix = f"use the model's own template (auto) or {jinja_file}" if template else f"give {jinja_file}"
            raise DataError(f"{what}: no model learns to stop at that", where="data.template", fix=fix)
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
    return hashlib.sha256(template.encode()).hexdigest()


class GenerationBlocks(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}`: transformers' mark around the assistant's text."""

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
        self.text, self.traits, self._tokens = text, traits, dict(tokens)
        try:
            self._template = _Environment().from_string(text)
        except TemplateSyntaxError as error:
            where = f"data.template, line {error.lineno}"
            raise DataError(f"is not a Jinja template: {error.message}", where=where, fix="correct it there") from error
        self.has_marks = "endgeneration" in text

    def render(self, messages: Sequence[Message], *, tools: str = "", prompts: bool = False) -> tuple[str, list[Span]]:
        """Return the chat as text, with the header of an answer if `prompts`, and where generation blocks lie in it.
        Raise DataError where the template refuses this chat; `what` is its own reason.
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
        if not self.has_marks:
            return text, []
        first, *others = text.split(OPEN)
        plain, spans, at = [first], [], len(first)
        for part in others:
            inside, _, after = part.partition(CLOSE)
            spans.append((at, at + len(inside)))
            at += len(inside) + len(after)
            plain += (inside, after)
        return "".join(plain), spans

    def with_traits(self, traits: TemplateTraits) -> ChatTemplate:
        """Return the same template with chats in the form of `traits`."""
        return ChatTemplate(self.text, self._tokens, traits=traits)

    def _turn(self, message: Message) -> dict[str, Any]:
        turn = message.as_json()
        if self.traits.arguments_as_text:
            for call, written in zip(message.calls, turn.get("tool_calls", ()), strict=True):
                written["function"]["arguments"] = call.arguments
        if self.traits.content_in_parts:
            turn["content"] = [{"type": "text", "text": message.content}]
        return turn


class _Environment(ImmutableSandboxedEnvironment):
    """The environment of transformers/utils/chat_template_utils.py, so that every template means the same here; but a
    sandbox in which loops and macros end when their time is used.
    """

    tick = staticmethod(tick)

    def __init__(self) -> None:
        def refuse(message: str) -> NoReturn:
            raise TemplateError(message)

        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, jinja2.ext.loopcontrols])
        self.filters["tojson"] = lambda value, ensure_ascii=False, **form: json.dumps(
            value, ensure_ascii=ensure_ascii, **form
        )
        self.globals["raise_exception"] = refuse
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)

    def _parse(self, source: str, *place: Any) -> nodes.Template:
        tree = super()._parse(source, *place)
        bodies: list[Any] = [*tree.find_all(nodes.For), *tree.find_all(nodes.Macro)]
        for node in bodies:
            call = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(call).set_lineno(node.lineno))
        return tree.set_environment(self)  # type: ignore[return-value]


OPENINGS = ("", "<think>\nWell.\n</think>\n\n")
"""The beginnings of answers: a template that expects thinking cannot hold on chats without any."""

NEXT = Message("user", "Ping next?")

_CALL = Call("find_stone", '{"stone": "grey slate"}', "callstone")  # nine letters: Mistral's templates insist on that


def probe_chats(template: ChatTemplate, opening: str) -> list[Chat]:
    """Return chats without tools; all answers begin with `opening`."""

    def by_turns(*texts: str) -> Chat:
        turns = [Message("assistant" if place % 2 else "user", text) for place, text in enumerate(texts)]
        return Chat(tuple(turns), Source("(built-in chat)", 1))

    one, two = f"{opening}Pong one.", f"{opening}Pong two."
    plain, short = by_turns("Ping one?", one, "Ping two?", two, "Ping three?", one), by_turns("Ping one?", one)
    try:
        header = template.render(plain.messages)[0]
    except DataError:
        return [short]
    return [plain, by_turns(f"Read {header} again", one, "Ping two?", two), short]


def tool_probe_chats() -> list[Chat]:
    """Return chats with a call: one that goes on after it, and its beginning, which ends with the call."""
    turns = (
        Message("user", "Where is it?"),
        Message("assistant", "", (_CALL,)),
        Message("tool", "under the bridge", name=_CALL.name, call_id=_CALL.id),
        Message("assistant", "Below."),
        NEXT,
        Message("assistant", "Pong next."),
    )
    parameters = {"type": "object", "properties": {"stone": {"type": "string", "description": "Its colour"}}}
    tool = {"name": _CALL.name, "description": "Looks for a stone", "parameters": parameters}
    tools = json.dumps([{"type": "function", "function": tool}])
    whole = Chat(turns, Source("(built-in chat with a call)", 1), tools=tools)
    return [whole, *whole.turns_apart()[:1]]


def content_forms(template: ChatTemplate) -> list[ChatTemplate]:
    """Return the template given texts, and given parts where it looks at the type of one."""
    plain = template.with_traits(TemplateTraits(arguments_as_text=_wants_text(template)))
    if not re.search(r"""['"]type['"]|\.type\b""", template.text):
        return [plain]
    return [plain, template.with_traits(replace(plain.traits, content_in_parts=True))]


def _wants_text(template: ChatTemplate) -> bool:
    """Return True if a call is written only, or only as JSON, with its arguments as text."""
    chat = tool_probe_chats()[1]
    (call,) = chat.messages[1].calls
    with suppress(DataError):
        if str(json.loads(call.arguments)) not in template.render(chat.messages, tools=chat.tools)[0]:
            return False
    with suppress(DataError):
        as_text = template.with_traits(TemplateTraits(arguments_as_text=True))
        return call.arguments in as_text.render(chat.messages, tools=chat.tools)[0]
    return False


def find_closings(template: ChatTemplate, chats: Sequence[Chat], *, special: Iterable[str]) -> tuple[str, str]:
    """Find what ends a last turn of a template without end tokens: the first token of the next turn.

    Only a token of that turn's own will do, one with which no answer begins (GLM-4 has <|user|> and <|observation|>);
    where all turns begin alike, or white space comes first, the template has forgotten its end token.
    """
    called = tool_probe_chats()[0]
    after_text = next((_next_token(template, chat, next_turn=NEXT, special=special) for chat in chats), "")
    after_calls = _next_token(
        template, replace(called, messages=called.messages[:2]), next_turn=called.messages[2], special=special
    )
    return after_text, after_calls or after_text


def _next_token(template: ChatTemplate, chat: Chat, *, next_turn: Message, special: Iterable[str]) -> str:
    try:
        text, _ = template.render(chat.messages, tools=chat.tools)
        longer, _ = template.render((*chat.messages, next_turn), tools=chat.tools)
        header, _ = template.render(chat.prompt, tools=chat.tools, prompts=True)
    except DataError:
        return ""
    if not longer.startswith(text):
        return ""
    fits = [token for token in special if token and longer.startswith(token, len(text))]
    token = max(fits, key=len, default="")
    opening = header[len(template.render(chat.prompt, tools=chat.tools)[0]) :]
    return "" if not opening or token in opening else token
