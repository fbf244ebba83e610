"""Write Ollama's Modelfile: the chat template in Go's language, the tokens that end an answer, system prompt, sampling.

Ollama knows no Jinja (https://github.com/ollama/ollama, template/template.go): without a TEMPLATE it takes the most
similar one of its own list. Here the pieces around each message are found by rendering marked messages, and hold only
if they give the Jinja template's text for every dialogue that is tried.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jinja2.exceptions import TemplateError

Message = Mapping[str, str]
_USER, _ASSISTANT, _SYSTEM = "zqUSERONEzq", "zqANSWERzq", "zqSYSTEMzq"
_NEXT = "zqUSERTWOzq"
_TRIED = ("Hello", "two\nlines\n\nand \"quotes\" 'too'", "{{ .System }} {% x %} \\n", "ünïcödé 你好 👩‍👩‍👧")


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """What a chat template writes around the messages of a dialogue that ends with the user's."""

    start: str
    """Before the first message, where there is no system prompt."""

    user: tuple[str, str]
    assistant: tuple[str, str]
    """Before and behind each message of the role."""

    answer: str
    """Behind the last message: the answer begins here."""

    system: tuple[str, str] | None
    """Around the system prompt, which stands in for `start`; None where the template takes none."""

    is_in_first_turn: bool = False
    """The system prompt, with its pieces, stands inside the first user's turn."""

    def render(self, messages: Sequence[Message]) -> str:
        """Return the prompt that Ollama makes."""
        system = "\n\n".join(message["content"] for message in messages if message["role"] == "system")
        if system and self.system and not self.is_in_first_turn:
            text, inner = self.system[0] + system + self.system[1], ""
        else:
            text = self.start
            inner = self.system[0] + system + self.system[1] if system and self.system else ""
        for message in messages:
            if message["role"] == "user":
                text, inner = text + self.user[0] + inner + message["content"] + self.user[1], ""
            elif message["role"] == "assistant":
                text += self.assistant[0] + message["content"] + self.assistant[1]
        return text + self.answer

    def as_go(self) -> str:
        """Return the template in Go's language (https://pkg.go.dev/text/template)."""
        user, assistant = map(_literal, self.user), map(_literal, self.assistant)
        begin, inner, start = "", "", _literal(self.start)
        if self.system and self.is_in_first_turn:
            before, behind = map(_literal, self.system)
            begin = "{{ $system := .System }}"
            inner = f'{{{{ if $system }}}}{before}{{{{ $system }}}}{behind}{{{{ $system = "" }}}}{{{{ end }}}}'
        elif self.system:
            before, behind = map(_literal, self.system)
            otherwise = f"{{{{ else }}}}{start}" if start else ""
            start = f"{{{{ if .System }}}}{before}{{{{ .System }}}}{behind}{otherwise}{{{{ end }}}}"
        before_user, behind_user = user
        before_answer, behind_answer = assistant
        return (
            f'{begin}{start}{{{{ range .Messages }}}}{{{{ if eq .Role "user" }}}}{before_user}{inner}{{{{ .Content }}}}'
            f'{behind_user}{{{{ else if eq .Role "assistant" }}}}{before_answer}{{{{ .Content }}}}{behind_answer}'
            f"{{{{ end }}}}{{{{ end }}}}{_literal(self.answer)}"
        )

    def without(self, bos: str) -> Pieces:
        """Return the pieces for an engine that writes the beginning token itself."""
        system = self.system
        if system and not self.is_in_first_turn:
            system = (system[0].removeprefix(bos), system[1])
        return replace(self, start=self.start.removeprefix(bos), system=system)


def _literal(text: str) -> str:
    """Return text for a Go template inside a Modelfile, whose parser drops characters that cannot be printed and ends a
    value at three quotation marks. An action follows the text, so that a brace at its end would be taken for the
    action's."""
    text = re.sub(r'\{\{|\{\Z|"""', lambda match: "".join(f"{{{{ `{letter}` }}}}" for letter in match[0]), text)
    return "".join(letter if _is_kept(letter) else f'{{{{ "\\U{ord(letter):08x}" }}}}' for letter in text)


def _is_kept(letter: str) -> bool:
    return letter.isprintable() or letter in "\n\t"


class NoPieces(Exception):
    """The template writes something that Ollama's variables cannot say."""


def find_pieces(tokenizer: Any) -> Pieces:
    """Return the pieces of the tokenizer's chat template. Raise NoPieces with the reason where they do not exist."""

    def render(*messages: tuple[str, str], answers: bool = True) -> str:
        dialogue = [{"role": role, "content": content} for role, content in messages]
        return tokenizer.apply_chat_template(dialogue, tokenize=False, add_generation_prompt=answers)

    first, answer, second = ("user", _USER), ("assistant", _ASSISTANT), ("user", _NEXT)
    try:
        one, alone = render(first), render(first, answers=False)
        two, closed = render(first, answer, second), render(first, answer, answers=False)
        before, begin = _cut(one, _USER)
        behind_user = _cut(alone, _USER)[1]
        middle, rest = _cut(_cut(two, _USER)[1], _ASSISTANT)
        behind_answer = _cut(closed, _ASSISTANT)[1]
        between = _cut(rest, _NEXT)[0]
        before_user = _strip(between, behind_answer)
        pieces = Pieces(
            start=_strip_end(before, before_user), user=(before_user, behind_user),
            assistant=(_strip(middle, behind_user), behind_answer), answer=_strip(begin, behind_user), system=None,
        )  # fmt: skip
    except TemplateError as error:
        raise NoPieces(f"it refuses a plain dialogue: {error}") from None
    try:
        sooner, later = _cut(render(("system", _SYSTEM), first), _SYSTEM)
        inner = _cut(later, _USER)[0]
        if inner.endswith(before_user) and before_user:
            pieces = replace(pieces, system=(sooner, inner.removesuffix(before_user)))
        else:
            opened = _strip(sooner, pieces.start + before_user)
            pieces = replace(pieces, system=(opened, inner), is_in_first_turn=True)
    except TemplateError:
        pass  # a template that takes no system prompt
    for dialogue in list_dialogues(has_system=pieces.system is not None):
        expected = render(*((message["role"], message["content"]) for message in dialogue))
        if (found := pieces.render(dialogue)) != expected:
            raise NoPieces(f"of {len(dialogue)} messages it makes {expected!r}, and such pieces {found!r}")
    return pieces


def list_dialogues(*, has_system: bool) -> list[list[Message]]:
    """Return the dialogues that are tried: one to three turns, each with and without a system prompt."""
    dialogues = list[list[Message]]()
    for turns in (1, 2, 3):
        for system in ("", *(_TRIED[:3] if has_system else ())):
            dialogue: list[Message] = [{"role": "system", "content": system}] if system else []
            for turn in range(turns):
                dialogue.append({"role": "user", "content": _TRIED[turn]})
                if turn + 1 < turns:
                    dialogue.append({"role": "assistant", "content": _TRIED[3 - turn]})
            dialogues.append(dialogue)
    return dialogues


def _cut(text: str, marker: str) -> tuple[str, str]:
    before, found, behind = text.partition(marker)
    if not found or marker in behind:
        raise NoPieces(f"a message is not written once: {text!r}")
    return before, behind


def _strip(text: str, beginning: str) -> str:
    if not text.startswith(beginning):
        raise NoPieces(f"{text!r} does not begin with {beginning!r}, as it does elsewhere")
    return text[len(beginning) :]


def _strip_end(text: str, end: str) -> str:
    if not text.endswith(end):
        raise NoPieces(f"{text!r} does not end with {end!r}, as it does in later turns")
    return text[: len(text) - len(end)]


def write_modelfile(
    file: str, tokenizer: Any, *, adds_bos: bool, end_tokens: Sequence[str], system: str, sampling: Mapping[str, Any]
) -> tuple[str, str]:
    """Return the Modelfile's text for the GGUF `file` next to it, and why it has no TEMPLATE: empty where it has."""
    lines = [f"FROM ./{file}"]
    reason = ""
    if tokenizer.chat_template:
        try:
            pieces = find_pieces(tokenizer)
            bos = tokenizer.bos_token or ""
            lines.append(f'TEMPLATE """{(pieces.without(bos) if adds_bos and bos else pieces).as_go()}"""')
        except NoPieces as error:
            reason = " ".join(str(error).split())
            lines += [
                "# No TEMPLATE: Ollama's language cannot say this model's chat template, and Ollama would guess one.",
                "# Use llama.cpp, which reads it from the file: llama-server --jinja --model " + file,
            ]
    else:
        lines.append('TEMPLATE """{{ .Prompt }}"""')
    if system and ('"""' in system or not all(map(_is_kept, system))):
        lines.append(
            "# A Modelfile cannot hold the run's system prompt, for its characters: send it with each request."
        )
    elif system:
        lines.append(f'SYSTEM """{system}"""')
    lines += [f"PARAMETER stop {_quote(token)}" for token in end_tokens]
    lines += [f"PARAMETER {name} {value:g}" for name, value in _parameters(sampling).items()]
    return "\n".join(lines) + "\n", reason


def _quote(token: str) -> str:
    return f'"""{token}"""' if '"' in token else f'"{token}"'


def _parameters(sampling: Mapping[str, Any]) -> dict[str, float]:
    """Return Ollama's settings for a generation_config: greedy where transformers would be."""
    penalty = {"repeat_penalty": float(sampling.get("repetition_penalty") or 1.0)}
    if not sampling.get("do_sample"):
        return {"temperature": 0.0} | penalty
    named = ("temperature", "top_p", "top_k", "min_p")
    return {name: float(sampling[name]) for name in named if sampling.get(name) is not None} | penalty
