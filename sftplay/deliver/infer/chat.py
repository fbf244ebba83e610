"""A conversation with a model: what was said, how it is asked, and the commands that change either.

It reads no keyboard and prints nothing; `verbs/talk` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from threading import Event
from typing import Any

from sftplay.data.records import Message
from sftplay.deliver.infer.generate import Generator, stream_answer
from sftplay.errors import DataError, nearest_names

NO_SYSTEM = "-"

HELP = f"""\
/reset            forget what was said; the system prompt stays
/system TEXT      set the system prompt; {NO_SYSTEM} removes it, without TEXT it is shown
/temperature X    0 takes the likeliest words, 1 draws them as the model weighs them; without X it is shown
/max N            longest answer in tokens; without N it is shown
/help             this list
/quit             end, as an empty line or the end of input does
A line that begins with a space is said as it is. Ctrl-C ends an answer; at the prompt it ends the program."""


@dataclass
class Conversation:
    """One conversation and its settings; an answer draws on random numbers of its own, the nth always on the same."""

    generator: Generator
    renderer: Any
    system: str | None = None
    turns: list[Message] = field(default_factory=list)
    n_asked: int = 0

    def ask(self, words: str, stop: Event, note: Callable[[str], None]) -> Iterator[str]:
        """Pieces of the answer to `words`, until `stop` is set; both are remembered, unless nothing was answered.

        Where the conversation no longer fits the model's context, its oldest turns are forgotten, and `note` hears it.

        Raises:
            DataError: the template refuses the conversation, or `words` alone do not fit; they are not remembered.
        """
        before = list(self.turns)
        self.turns.append(Message("user", words))
        pieces: list[str] = []
        try:
            prompt, generator = self._fitted(note)
            self.n_asked += 1
            for piece in stream_answer(generator, prompt, self.n_asked, stop):
                pieces.append(piece)
                yield piece
        except BaseException:
            self.turns = before
            raise
        if pieces or not stop.is_set():
            self.turns.append(Message("assistant", "".join(pieces)))
        else:
            self.turns.pop()

    def _fitted(self, note: Callable[[str], None]) -> tuple[list[int], Generator]:
        """The prompt, and the generator with as long an answer as has room."""
        context, answer = self.generator.context_tokens, self.generator.max_new_tokens
        n_forgotten = 0
        prompt = self._prompt()
        while context is not None and len(prompt) + answer > context and len(self.turns) > 1:
            del self.turns[:2]
            n_forgotten += 2
            prompt = self._prompt()
        if n_forgotten:
            room = f"the model reads {context} tokens, {answer} of them kept for the answer"
            note(f"{room}: the oldest {n_forgotten} turns are forgotten")
        if context is None or len(prompt) + answer <= context:
            return prompt, self.generator
        if len(prompt) >= context:
            what = f"this has {len(prompt)} tokens, and the model reads {context}"
            raise DataError(what, fix="say it in fewer words")
        note(f"the model reads {context} tokens: there is room for an answer of {context - len(prompt)}")
        return prompt, replace(self.generator, max_new_tokens=context - len(prompt))

    def _prompt(self) -> list[int]:
        lead = [Message("system", self.system)] if self.system else []
        ids: list[int] = self.renderer.prompt_ids([*lead, *self.turns])
        return ids


def run_command(dialogue: Conversation, line: str) -> str | None:
    """Do what a line that begins with / says, and answer it; None when the conversation is to end."""
    word, _, rest = line.strip().partition(" ")
    if word == "/quit":
        return None
    action = COMMANDS.get(word)
    if action is None:
        near = nearest_names(word, [*COMMANDS, "/quit"])
        hint = f"did you mean {near[0]}?" if near else "/help lists what there is"
        return f"no command {word!r}: {hint} (a line that begins with a space is said as it is)"
    return action(dialogue, rest.strip())


def _reset(dialogue: Conversation, rest: str) -> str:
    if rest:
        return "/reset takes nothing after it"
    dialogue.turns.clear()
    return "what was said is forgotten"


def _system(dialogue: Conversation, rest: str) -> str:
    if rest:
        dialogue.system = None if rest == NO_SYSTEM else rest
    return f"system prompt: {dialogue.system}" if dialogue.system else "there is no system prompt"


def _temperature(dialogue: Conversation, rest: str) -> str:
    if rest:
        try:
            value = float(rest)
        except ValueError:
            value = math.nan
        if not 0 <= value < math.inf:
            return f"not a temperature: {rest!r} (0 or more)"
        generator = dialogue.generator
        dialogue.generator = replace(generator, sampling=replace(generator.sampling, temperature=value))
    sampling = dialogue.generator.sampling
    cut = f", top-p {sampling.top_p:g}" if sampling.temperature and sampling.top_p < 1 else ""
    return f"temperature {sampling.temperature:g}{cut}{'' if sampling.temperature else ': the likeliest words'}"


def _max(dialogue: Conversation, rest: str) -> str:
    if rest:
        if not rest.isdecimal() or int(rest) == 0:
            return f"not a number of tokens: {rest!r}"
        dialogue.generator = replace(dialogue.generator, max_new_tokens=int(rest))
    return f"answers of at most {dialogue.generator.max_new_tokens} tokens"


def _help(dialogue: Conversation, rest: str) -> str:
    return HELP


COMMANDS: dict[str, Callable[[Conversation, str], str]] = {
    "/reset": _reset,
    "/system": _system,
    "/temperature": _temperature,
    "/max": _max,
    "/help": _help,
}
