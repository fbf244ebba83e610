"""The turns of a dialogue as one stream of tokens, and the calls in what a model wrote.

What a model sampled is kept as it is. What answers it is tokenised once, as the chat template writes it between two
turns of the model. `Dialogue.prove` shows for a template that the stream is the template's own text of the whole
dialogue.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sftplay.data.calls import encode_json, tie_results, tools_text
from sftplay.data.records import IGNORE_INDEX, Call, Chat, Message
from sftplay.data.render.masks import NOWHERE
from sftplay.data.render.render import Renderer
from sftplay.data.render.templates import OPENINGS
from sftplay.errors import DataError

TEMPLATE = "data.template"


@dataclass(frozen=True)
class Malformed:
    """A call that cannot be read; the reason is for the model."""

    reason: str


@dataclass(frozen=True)
class JsonCalls:
    """Calls that a template writes as JSON objects: `before`, the calls with `between` them, `after`. All three texts
    are compared without the white space around them."""

    before: str
    between: str | None  # None where a turn holds one call
    name: str  # the keys of the object
    arguments: str
    inside: str = ""  # the key of the object that has them, where a call is wrapped

    @classmethod
    def find(cls, write: Callable[[str, Sequence[Call]], str]) -> JsonCalls | None:
        """Find the form by what `write` writes for a text with calls; None where they are no JSON objects."""
        one, two = PROBE_CALLS
        try:
            text = write(PROBE_TEXT, [one])
        except DataError:  # some templates leave a text next to calls out
            text = write("", [one])
        start = text.rfind(PROBE_TEXT) + len(PROBE_TEXT) if PROBE_TEXT in text else 0
        for begin, _, call in find_objects(text):
            for inside, inner in (("", call), *call.items()):
                keys = _find_keys(inner, one) if isinstance(inner, dict) else None
                if keys is None:
                    continue
                between = None
                with suppress(DataError):  # a template may refuse two calls
                    both = write("", [one, two])
                    places = [(at, end) for at, end, found in find_objects(both) if not inside or inside in found]
                    between = both[places[-2][1] : places[-1][0]].strip() if len(places) > 1 else None
                return cls(text[start:begin].strip(), between, *keys, inside=inside)
        return None

    def read(self, text: str) -> list[Call | Malformed]:
        """Read the calls of a turn; empty where it has none."""
        text = text.rpartition("</think>")[2]
        at = text.find(self.before)
        if at < 0 or (not self.before and not text.lstrip().startswith("{")):
            return []
        calls, decoder, at = list[Call | Malformed](), json.JSONDecoder(), at + len(self.before)
        while True:
            at = _skip_space(text, at)
            try:
                found, at = decoder.raw_decode(text, at)
                calls.append(self._read_one(found))
            except (ValueError, RecursionError) as error:
                is_text = not self.before and not calls  # a text may begin with a brace
                return [] if is_text else [*calls, Malformed(f"this is no call: {error}")]
            at = _skip_space(text, at)
            if self.between is None or not text.startswith(self.between, at) or at >= len(text):
                return calls
            at += len(self.between)

    def _read_one(self, value: Any) -> Call | Malformed:
        inner = value.get(self.inside) if self.inside and isinstance(value, dict) else value
        if not isinstance(inner, dict) or not isinstance(inner.get(self.name), str):
            return Malformed(f"a call is an object with {self.name} and {self.arguments}")
        arguments = inner.get(self.arguments, {})
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if not isinstance(arguments, dict):
            return Malformed(f"{self.arguments} is no object")
        return Call(inner[self.name], encode_json(arguments), "")


TRAINING = "_training"


def find_trl_template(template: str) -> Path | None:
    """Return TRL's own copy of a chat template; None where it has none."""
    import trl

    folder = Path(trl.__file__).parent / "chat_templates"
    return next((path for path in sorted(folder.glob("*.jinja")) if path.read_text(encoding="utf-8") == template), None)


class ParsedCalls:
    """Calls that the tokenizer's own `parse_response` reads: by the response template shipped with it, or by TRL's for
    the families that it knows."""

    def __init__(self, tokenizer: Any, tools: str) -> None:
        """Raise DataError where neither has one for this chat template."""
        self.tokenizer, self.tools = tokenizer, json.loads(tools)
        if getattr(tokenizer, "response_template", None) is None:
            from trl.chat_template_utils import add_response_schema

            try:
                self.tokenizer = copy(tokenizer)
                if (path := find_trl_template(tokenizer.chat_template)) and path.stem.endswith(TRAINING):
                    # TRL knows the parser of the template that this one was made from.
                    path = path.with_name(path.name.replace(TRAINING, ""))
                    self.tokenizer.chat_template = path.read_text(encoding="utf-8")
                add_response_schema(self.tokenizer)
            except (ValueError, ImportError, OSError):
                what = "its calls are no JSON objects, and neither the tokenizer nor TRL says how to read them"
                raise DataError(what) from None

    def read(self, text: str) -> list[Call | Malformed]:
        """Read the calls of a turn; empty where it has none."""
        try:
            message = self.tokenizer.parse_response(text, prefix="", tools=self.tools)
            found = message.get("tool_calls") or []
            return [Call(call["function"]["name"], encode_json(call["function"]["arguments"]), "") for call in found]
        except Exception as error:  # noqa: BLE001 - a border to the parser, whose errors are of many types
            return [Malformed(f"this is no call: {str(error).splitlines()[0][:200] if str(error) else type(error)}")]


PROBE_TEXT = "Pong."
PROBE_CALLS = (
    Call("find_stone", '{"stone": "grey slate"}', "callstone"),
    Call("find_tree", '{"tree": "oak"}', "calltrees"),
)

_PROBE_TOOLS = tools_text(
    [
        {
            "name": call.name,
            "description": "Looks for it",
            "parameters": {"type": "object", "properties": {key: {"type": "string"}}},
        }
        for call, key in zip(PROBE_CALLS, ("stone", "tree"), strict=True)
    ]
)  # fmt: skip


class Dialogue:
    """The turns of one template and one tokenizer. Made by `prove`."""

    def __init__(self, renderer: Renderer, *, tools: str) -> None:
        """`tools` are those that the prompts show, as JSON text in OpenAI's form; empty for none."""
        self.renderer, self.tools = renderer, tools
        self.calls: JsonCalls | ParsedCalls | None = None

    @classmethod
    def prove(cls, renderer: Renderer, *, tools: str, has_environment: bool, named: str) -> Dialogue:
        """Return the dialogue of a template after trying it on built-in dialogues; `named` is what the config calls it.

        Raises:
            DataError: there is no template; the stream of the turns differs from the template's text of the whole
                dialogue; or no form of calls is known.
        """
        found = cls(renderer, tools=tools)
        if renderer.template is None:
            what = "turns of tools or an environment need a chat template, and there is none"
            raise DataError(what, where=TEMPLATE, fix="set data.template")
        if tools:
            found.calls = found._find_calls(named)
        for turns in probe_dialogues(
            has_calls=bool(tools), has_environment=has_environment, thinks="</think>" in renderer.template
        ):
            try:
                found._check(turns)
            except DataError as error:
                what = f"the chat template {named} is refused for turns: {error.what}"
                path = find_trl_template(renderer.template)
                path = path and path.with_name(f"{path.stem}{TRAINING}.jinja")
                file = f"{path}, which" if path and path.exists() else "a Jinja file of your own that"
                fix = f"write data.template: {file} keeps earlier turns as the model wrote them; or chatml"
                raise DataError(what, where=TEMPLATE, fix=fix) from None
        return found

    def answer_ids(self, answers: Sequence[Message], calls: Sequence[Call] = ()) -> tuple[int, list[int]]:
        """Return the token that ends a turn of the model, and the tokens from there to the model's next turn.

        `answers` answer the turn: the results of its `calls`, or a user's turn where it has none. Raise DataError where
        the template refuses them, or they type what cannot be kept apart from control.
        """
        problem = ""
        for opening in OPENINGS:  # a template may write an empty thinking only in the last turn
            text = opening.strip() if calls else f"{opening}Pong."
            turns = tie_results((Message("user", "Ping?"), Message("assistant", text, tuple(calls)), *answers))
            (head,) = self.renderer.render([Chat(turns[:2], NOWHERE, 1, tools=self.tools)])
            problem = head.problem or "the text up to a turn is not the beginning of the whole text"
            if head.problem:
                continue
            end = 1 + max(at for at, label in enumerate(head.labels) if label != IGNORE_INDEX)
            whole = self.renderer.prompt_ids(turns, self.tools)
            if whole[:end] == head.input_ids[:end]:
                return whole[end - 1], whole[end:]
        raise DataError(problem)

    def read_calls(self, text: str) -> list[Call | Malformed]:
        """Read the calls in a turn of the model, special tokens included."""
        return self.calls.read(text) if self.calls else []

    def _find_calls(self, named: str) -> JsonCalls | ParsedCalls:
        def write(text: str, calls: Sequence[Call]) -> str:
            turns = (Message("user", "Where is it?"), Message("assistant", text, tuple(calls)))
            return self.renderer.answer_text(Chat(turns, NOWHERE, tools=_PROBE_TOOLS))

        due = [replace(PROBE_CALLS[0], id="")]
        try:
            written, found = write("", PROBE_CALLS[:1]), JsonCalls.find(write)
            if found and found.read(written) == due:
                return found
            if ParsedCalls(self.renderer.tokenizer, _PROBE_TOOLS).read(written) == due:
                return ParsedCalls(self.renderer.tokenizer, self.tools)
            raise DataError("a call that it writes is not read back")
        except DataError as error:
            what = f"the chat template {named} is refused for tools: {error.what}"
            fix = "take a model whose chat template writes calls, or data.template: chatml"
            raise DataError(what, where=TEMPLATE, fix=fix) from None

    def _check(self, turns: Sequence[Message]) -> None:
        """Raise DataError unless the stream of the turns is the template's text of the whole dialogue."""
        first = next(at for at, turn in enumerate(turns) if turn.role == "assistant")
        stream = self.renderer.prompt_ids(turns[:first], self.tools)
        for at in range(first, len(turns)):
            if turns[at].role != "assistant":
                continue
            chat = Chat(tuple(turns[: at + 1]), NOWHERE, at, tools=self.tools)
            rendered = self.renderer.render([chat])[-1]
            if rendered.problem:
                raise DataError(rendered.problem)
            learned = [label for label in rendered.labels if label != IGNORE_INDEX]
            answers = []
            for turn in turns[at + 1 :]:
                if turn.role == "assistant":
                    break
                answers.append(turn)
            end, ids = self.answer_ids(answers, turns[at].calls)
            if learned[-1] != end:
                raise DataError("turns of the model end with different tokens")
            stream += learned + ids
            whole = self.renderer.prompt_ids(turns[: at + 1 + len(answers)], self.tools)
            if stream != whole:
                n = next((n for n, pair in enumerate(zip(stream, whole, strict=False)) if pair[0] != pair[1]), 0)
                decode = self.renderer.tokenizer.decode
                joined = f"where the turns joined have {decode(stream[n : n + 12])!r}"
                raise DataError(f"in a whole dialogue it writes {decode(whole[n : n + 12])!r} {joined}")


def probe_dialogues(*, has_calls: bool, has_environment: bool, thinks: bool) -> Iterator[list[Message]]:
    """Yield dialogues that end with an answer to the model; all its turns begin alike in one."""
    system, asked = Message("system", "Be brief."), Message("user", "Where is it?\n")
    for opening in OPENINGS if thinks else OPENINGS[:1]:
        texts = [Message("assistant", f"{opening}{text}") for text in ("Pong.", "One: 1\n\n 2", "Größe 5")]
        said = [Message("user", text) for text in ("Colder.", "  Line\n\nline ", "{'a': 1} Ää")]
        called = [Message("assistant", opening.strip(), (call,)) for call in PROBE_CALLS]
        results = [
            Message("tool", text, name=call.name, call_id=call.id)
            for text, call in zip(("under the\n\n bridge", '{"found": 7}'), PROBE_CALLS, strict=True)
        ]
        by_calls = [called[0], results[0], called[1], results[1]]
        if has_environment:
            turns = [asked, texts[0], said[0], texts[1], said[1], texts[2], said[2]]
            yield turns
            yield [system, *turns]
        if has_calls:
            yield [asked, *by_calls]
            yield [system, asked, *by_calls]
        if has_calls and has_environment:
            yield [asked, *by_calls[:2], texts[0], said[0], *by_calls[2:]]


def find_objects(text: str) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield the JSON objects in a text that lie in no other, with their places."""
    decoder, at = json.JSONDecoder(), 0
    while (at := text.find("{", at)) >= 0:
        try:
            found, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            at += 1
            continue
        yield at, end, found
        at = end


def _find_keys(value: dict[str, Any], call: Call) -> tuple[str, str] | None:
    """Return the keys under which an object has the name and the arguments of a call."""
    due = json.loads(call.arguments)
    names = [key for key, inner in value.items() if inner == call.name]
    arguments = [
        key for key, inner in value.items()
        if inner == due or (isinstance(inner, str) and inner.startswith("{") and json.loads(inner) == due)
    ]  # fmt: skip
    return (names[0], arguments[0]) if names and arguments else None


_SPACE = re.compile(r"\s*")


def _skip_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at
