"""Which mask method holds for a template and a tokenizer, tried on dialogues of ours and on samples of the data.

Proven means: the decoded labels are the assistant's texts, each closed by its end-of-turn token, and each answer
follows the very text that inference prompts with. What holds for no sample is refused, with the sample shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sftplay.data.labels import IGNORE, encode, labelled
from sftplay.data.masks import Marked, Method, TurnFinder, squeezed
from sftplay.data.records import Chat, Message, Source
from sftplay.data.skeletons import Unproven
from sftplay.data.templates import ChatTemplate
from sftplay.errors import DataError

SHOWN_CHARACTERS = 600
THINKING = "<think>\nWell.\n</think>\n\n"


@dataclass(frozen=True)
class Proven:
    """What was found out about a template."""

    finder: TurnFinder
    method: Method
    rewrites_turns: bool
    """True when the template writes a turn differently once others follow; then every turn is its own example."""


def prove_masks(tokenizer: Any, template: ChatTemplate, samples: Sequence[Chat]) -> Proven:
    """The first of markers, sentinels and prefixes that holds on every built-in dialogue and on one sample at least.

    Samples that fail while another holds are no fault of the template: they are refused one by one when rendered.

    Raises:
        DataError: none holds.
    """
    finder = TurnFinder(template, _special_tokens(tokenizer))
    trial = _Trial(tokenizer, template, finder)
    faults: list[str] = []
    # A template whose answers begin with thinking cannot hold on dialogues without any, so those come second.
    for opening in ("", THINKING):
        probes = [probe for probe in trial.probes(opening) if trial.accepts(probe)]
        finder.learn_ends([*probes, *samples])
        rewrites = any(finder.rewrites(probe) for probe in probes)
        found, why = trial.first_method(probes, samples, rewrites)
        if found:
            return Proven(finder, found, rewrites)
        faults = faults or why
    raise trial.refusal((list(samples) or trial.probes(""))[0], faults)


class _Trial:
    """One template under examination."""

    def __init__(self, tokenizer: Any, template: ChatTemplate, finder: TurnFinder) -> None:
        self._tokenizer, self._template, self._finder = tokenizer, template, finder

    def probes(self, opening: str) -> list[Chat]:
        """Dialogues that ask what data seldom does: equal turns, and a user who types the template's own headers."""
        words = ["Ping one?", "Pong one.", "Ping two?", "Pong two.", "Ping three?", "Pong one."]
        words = [opening + word if word.startswith("Pong") else word for word in words]
        plain = _probe(words)
        try:
            header = self._template.render(plain.messages)[0]
        except DataError:
            return [_probe(words[:2])]
        return [plain, _probe([f"Read {header} again", *words[1:4]]), _probe(words[:2])]

    def accepts(self, chat: Chat) -> bool:
        """True when the template renders the chat at all."""
        try:
            self._template.render(chat.messages)
        except DataError:
            return False
        return True

    def first_method(
        self, probes: Sequence[Chat], samples: Sequence[Chat], rewrites: bool
    ) -> tuple[Method | None, list[str]]:
        """The first method that holds, or what is wrong with each."""
        methods: list[Method] = ["markers", "sentinels", "prefixes"]
        faults = []
        for method in methods if self._template.has_marks else methods[1:]:
            fault = self._fault(method, probes, samples, rewrites=rewrites)
            if not fault:
                return method, []
            faults.append(f"by {method}: {fault}")
        return None, faults

    def refusal(self, sample: Chat, faults: list[str]) -> DataError:
        """The error for a template that no method holds for."""
        try:
            shown = self._template.render(sample.messages)[0]
        except DataError as error:
            shown = f"({error.what})"
        if not self._finder.ends:
            faults = [*faults, "no special token follows the assistant's text, so the model could not learn to stop"]
        why = "\n  ".join(faults)
        return DataError(
            "the chat template is refused: nothing tells reliably which tokens the assistant says\n"
            f"  {why}\n  sample {sample.source}, as the template writes it: {shown[:SHOWN_CHARACTERS]!r}",
            where="data.template",
            fix="set data.template: chatml, or a Jinja file that writes each answer and an end token after it",
        )

    def _fault(self, method: Method, probes: Sequence[Chat], samples: Sequence[Chat], *, rewrites: bool) -> str:
        """Why `method` is not proven, or nothing: probes it must mark by itself, samples with what `place` adds."""
        for probe in probes:
            parts = probe.turns_apart() if rewrites else [probe]
            for fault in (self._fault_of(part, method, rewrites=None) for part in parts):
                if fault:
                    return fault
        faults = []
        for sample in samples:
            faults.append(self._fault_of(sample, method, rewrites=rewrites))
            if not faults[-1]:
                return ""
        return faults[0] if faults else ("" if probes else "the template refuses every dialogue")

    def _fault_of(self, chat: Chat, method: Method, *, rewrites: bool | None) -> str:
        """Why the chat cannot be marked, or nothing; `rewrites` None asks for `method` alone."""
        try:
            if rewrites is None:
                found = [(chat, self._finder.find(chat, method))]
            else:
                found = self._finder.place(chat, method, rewrites=rewrites)
            for part, marked in found:
                self._finder.check_prompts(part, marked)
                self._check_decoded(marked)
        except DataError as error:
            return error.what
        except Unproven as error:
            return str(error)
        return ""

    def _check_decoded(self, marked: Marked) -> None:
        """Raise Unproven unless the labels, decoded, are the spans as this tokenizer reads them back."""
        rendered = labelled([(0, marked)], encode(self._tokenizer, [marked.text]))[0]
        learned = squeezed(self._decode([label for label in rendered.labels if label != IGNORE]))
        spans = encode(self._tokenizer, [marked.text[start:end] for start, end in marked.spans])
        expected = squeezed("".join(self._decode(span.ids) for span in spans))
        if learned != expected:
            raise Unproven(f"the labels read {learned[:80]!r} where the assistant says {expected[:80]!r}")

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False))


def _special_tokens(tokenizer: Any) -> list[str]:
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return [*special, tokenizer.eos_token or ""]


def _probe(words: list[str]) -> Chat:
    turns = [Message("assistant" if place % 2 else "user", text) for place, text in enumerate(words)]
    return Chat(tuple(turns), Source("(built-in dialogue)", 1))
