"""A conversation with a model: its turns, its settings, and the commands that change either.

It reads no keyboard and prints nothing; `commands/use/infer` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from threading import Event
from typing import Any

from sftplay.data.records import Message
from sftplay.errors import DataError, nearest_names
from sftplay.generate.generate import Generator, stream_answer

NO_SYSTEM = "-"

HELP = f"""\
/reset            forget the turns; the system prompt stays
/system TEXT      set the system prompt; {NO_SYSTEM} removes it, without TEXT it is shown
/temperature X    0 takes the likeliest words, 1 samples from the model's probabilities; without X it is shown
/max N            longest answer in tokens; without N it is shown
/help             this list
/quit             end, as an empty line or the end of input does
A line that begins with a space is said as it is. Ctrl-C ends an answer; at the prompt it ends the program."""


@dataclass
class Conversation:
    """One conversation and its settings. The nth answer always uses the same random numbers."""

    generator: Generator
    renderer: Any
    system: str | None = None
    turns: list[Message] = field(default_factory=list)
    n_asked: int = 0

    def ask(self, text: str, stop: Event, *, notify: Callable[[str], None]) -> Iterator[str]:
        """Yield parts of the answer to `text`, until `stop` is set; both are kept, unless nothing was answered.

        When the conversation no longer fits the context, its oldest turns are forgotten and `notify` gets a message.
        Raise DataError where the template refuses the conversation, or `text` alone does not fit; it is not kept.
        """
        before = list(self.turns)
        self.turns.append(Message("user", text))
        parts: list[str] = []
        try:
            prompt, generator = self._fit(notify)
            self.n_asked += 1
            for part in stream_answer(generator, prompt, row=self.n_asked, stop=stop):
                parts.append(part)
                yield part
        except BaseException:
            self.turns = before
            raise
        if parts:
            self.turns.append(Message("assistant", "".join(parts)))
        else:
            self.turns.pop()

    def _fit(self, notify: Callable[[str], None]) -> tuple[list[int], Generator]:
        """Return the prompt, and the generator with the longest answer that has room."""
        context, answer = self.generator.context_tokens, self.generator.max_new_tokens
        n_forgotten = 0
        while True:
            lead = [Message("system", self.system)] if self.system else []
            prompt: list[int] = self.renderer.prompt_ids([*lead, *self.turns])
            if context is None or len(prompt) + answer <= context or len(self.turns) == 1:
                break
            del self.turns[:2]
            n_forgotten += 2
        if n_forgotten:
            room = f"the model reads {context} tokens, {answer} of them kept for the answer"
            notify(f"{room}: the oldest {n_forgotten} turns are forgotten")
        if context is None or len(prompt) + answer <= context:
            return prompt, self.generator
        if len(prompt) >= context:
            what = f"this has {len(prompt)} tokens, and the model reads {context}"
            raise DataError(what, fix="say it in fewer words")
        notify(f"the model reads {context} tokens: there is room for an answer of {context - len(prompt)}")
        return prompt, replace(self.generator, max_new_tokens=context - len(prompt))


def run_command(conversation: Any, line: str) -> str | None:
    """Run the command of a line that begins with /, and return its reply; None ends the conversation.

    The conversation may have its own `commands`.
    """
    word, _, rest = line.strip().partition(" ")
    if word == "/quit":
        return None
    commands = getattr(conversation, "commands", COMMANDS)
    action = commands.get(word)
    if action is None:
        near = nearest_names(word, [*commands, "/quit"])
        hint = f"did you mean {near[0]}?" if near else "/help lists what there is"
        return f"no command {word!r}: {hint} (a line that begins with a space is said as it is)"
    return action(conversation, rest.strip())


def _reset(conversation: Conversation, rest: str) -> str:
    if rest:
        return "/reset takes nothing after it"
    conversation.turns.clear()
    return "what was said is forgotten"


def _system(conversation: Conversation, rest: str) -> str:
    if rest:
        conversation.system = None if rest == NO_SYSTEM else rest
    return f"system prompt: {conversation.system}" if conversation.system else "there is no system prompt"


def _temperature(conversation: Conversation, rest: str) -> str:
    if rest:
        try:
            value = float(rest)
        except ValueError:
            value = math.nan
        if not 0 <= value < math.inf:
            return f"not a temperature: {rest!r} (0 or more)"
        generator = conversation.generator
        conversation.generator = replace(generator, sampling=replace(generator.sampling, temperature=value))
    sampling = conversation.generator.sampling
    cut = f", top-p {sampling.top_p:g}" if sampling.temperature and sampling.top_p < 1 else ""
    return f"temperature {sampling.temperature:g}{cut}{'' if sampling.temperature else ': the likeliest words'}"


def _max(conversation: Conversation, rest: str) -> str:
    if rest:
        if not rest.isdecimal() or int(rest) == 0:
            return f"not a number of tokens: {rest!r}"
        conversation.generator = replace(conversation.generator, max_new_tokens=int(rest))
    return f"answers of at most {conversation.generator.max_new_tokens} tokens"


COMMANDS: dict[str, Callable[[Conversation, str], str]] = {
    "/reset": _reset,
    "/system": _system,
    "/temperature": _temperature,
    "/max": _max,
    "/help": lambda *_: HELP,
}
