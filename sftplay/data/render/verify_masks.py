"""Find the mask method that holds for a template and a tokenizer, by trying it on probe chats and samples of the data.

A method is proven when the decoded labels are the assistant's texts, each with its end-of-turn token, and when each
answer follows exactly the text and the tokens of the inference prompt. A template without a proven method is refused;
the error shows a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from sftplay.data.records import IGNORE_INDEX, Chat
from sftplay.data.render.escape_special_tokens import GUARD, unguarded
from sftplay.data.render.labels import labelled
from sftplay.data.render.masks import Marked, Method, TurnFinder, Unproven, squeezed, uses_tools
from sftplay.data.render.templates import (
    OPENINGS,
    ChatTemplate,
    TemplateTraits,
    content_forms,
    find_closings,
    probe_chats,
    tool_probe_chats,
)
from sftplay.data.render.writer import Writer
from sftplay.errors import DataError


@dataclass(frozen=True)
class MaskMethod:
    """The verified way to find the assistant's turns of a template."""

    traits: TemplateTraits
    ends: tuple[str, ...]  # texts that end an assistant's turn, the longest first
    method: Method
    tool_method: Method  # the method for chats with tools: their turns are not all of one shape
    rewrites_turns: bool
    """True when the template writes a turn differently if others follow it. Every turn is then its own example."""


def verify_masks(writer: Writer, template: ChatTemplate, *, samples: Sequence[Chat]) -> MaskMethod:
    """Return the first of markers, sentinels and prefixes that holds on every probe chat and on one sample at least.

    One sample that holds is enough. Samples that fail are refused one by one when they are rendered.

    Raises DataError: none holds.
    """
    faults: list[str] = []
    trials = [_Trial(writer, form) for form in content_forms(template)]
    for trial in trials:
        for opening in OPENINGS:
            found = trial.try_methods(opening, samples)
            if isinstance(found, MaskMethod):
                return found
            faults = faults or found
    raise trials[0].refusal((list(samples) or probe_chats(template, ""))[0], faults)


class _Trial:
    """One template under examination."""

    def __init__(self, writer: Writer, template: ChatTemplate) -> None:
        self._writer, self._template = writer, template
        self._finder = TurnFinder(template, writer.vocabulary.special_tokens)

    def try_methods(self, opening: str, samples: Sequence[Chat]) -> MaskMethod | list[str]:
        """Return what holds with answers that begin with `opening`, or what is wrong with each method."""
        probes = self._guard(probe_chats(self._template, opening), must_render=True)
        calls, guarded = self._guard(tool_probe_chats(), must_render=True), self._guard(samples)
        chats, special = [*probes, *calls, *guarded], self._writer.vocabulary.special_tokens
        ending = [*chats, *(part for chat in chats if uses_tools(chat) for part in chat.turns_apart())]
        self._finder.learn_ends(ending)
        if not self._finder.ends and any(closings := find_closings(self._template, chats, special=special)):
            self._template = self._template.with_traits(replace(self._template.traits, closings=closings))
            self._finder = TurnFinder(self._template, special)
            self._finder.learn_ends(ending)
        rewrites, has_marks = any(map(self._finder.rewrites, probes)), self._template.has_marks
        methods: list[Method] = ["markers", "sentinels", "prefixes"]
        faults = []
        for method in methods if has_marks else methods[1:]:
            fault = self._try_all(method, probes, samples=guarded, rewrites=rewrites)
            if not fault:
                break
            faults.append(f"by {method}: {fault}")
        else:
            return faults
        tool_method: Method = "prefixes"
        if calls and has_marks and not self._try_all("markers", calls, samples=[], rewrites=rewrites):
            tool_method = "markers"
        return MaskMethod(self._finder.template.traits, self._finder.ends, method, tool_method, rewrites)

    def refusal(self, sample: Chat, faults: list[str]) -> DataError:
        """Return the error for a template that no method holds for."""
        try:
            shown = self._finder.render_chat(sample)
        except DataError as error:
            shown = f"({error.what})"
        if not self._finder.ends:
            faults = [*faults, "no special token follows the assistant's text, so the model could not learn to stop"]
        fix = "set data.template: chatml, or a Jinja file that writes each answer and an end token after it"
        chat = sample.turns_apart()[0]
        try:
            prompt, whole = self._finder.render_prompt(chat, chat.learned_from), self._finder.render_chat(chat)
        except DataError:
            prompt = whole = ""
        n_shared = next(at for at in range(len(prompt), -1, -1) if whole.startswith(prompt[:at]))
        if opening := prompt[n_shared:].strip():  # what the text trained on lacks at that place
            faults = [f"the inference prompt ends with {opening!r}, which the text trained on leaves out", *faults]
            fix = "give data.template a Jinja file of your own: this template, with the same opening of answers in both"
        why = "\n  ".join(faults)
        return DataError(
            "the chat template is refused: no method finds reliably which tokens are the assistant's\n"
            f"  {why}\n  sample {sample.source}, as the template writes it: {shown[:600]!r}",
            where="data.template",
            fix=fix,
        )

    def _guard(self, chats: Sequence[Chat], *, must_render: bool = False) -> list[Chat]:
        """Return the chats with guards. A chat that holds a noncharacter is left out; it is refused later, as a row."""
        found = []
        for chat in chats:
            with suppress(DataError):
                guarded, _ = self._writer.escaper.guarded(chat)
                assert isinstance(guarded, Chat)
                if must_render:
                    self._finder.render_chat(guarded)
                found.append(guarded)
        return found

    def _try_all(self, method: Method, probes: Sequence[Chat], *, samples: Sequence[Chat], rewrites: bool) -> str:
        """Return why `method` is not proven, or nothing. It must mark probes alone, samples by `place`."""
        for probe in probes:
            parts = probe.turns_apart() if rewrites else [probe]
            for fault in (self._find_fault(part, method, rewrites=None) for part in parts):
                if fault:
                    return fault
        faults = []
        for sample in samples:
            faults.append(self._find_fault(sample, method, rewrites=rewrites))
            if not faults[-1]:
                return ""
        return faults[0] if faults else ("" if probes else "the template refuses every probe chat")

    def _find_fault(self, chat: Chat, method: Method, *, rewrites: bool | None) -> str:
        """Return why the chat cannot be marked, or nothing; `rewrites` None asks for `method` alone."""
        try:
            if rewrites is None:
                found = [(chat, self._finder.find(chat, method))]
            else:
                found = self._finder.place(chat, method, rewrites=rewrites)
            for part, marked in found:
                self._finder.check_prompts(part, marked)
                if self._writer.needs_spelling(marked.text.count(GUARD)):
                    marked = self._writer.spell(self._finder, part, marked=marked)
                self._check_tokens(part, marked)
        except DataError as error:
            return error.what
        except Unproven as error:
            return str(error)
        return ""

    def _check_tokens(self, part: Chat, marked: Marked) -> None:
        """Raise Unproven unless the labels, decoded, are the spans as this tokenizer reads them back, and the tokens
        before each are those of the inference prompt.

        An answer that begins with white space may share a token with the prompt.
        """
        (rendered,) = labelled(self._writer.vocabulary, [[marked]])
        if rendered.joins_prompt:
            raise Unproven(rendered.problem)
        if rendered.problem:  # this tokenizer cannot write what the chat types: each such row is refused by itself
            return
        decode = self._writer.vocabulary.decode
        learned = squeezed(decode([label for label in rendered.labels if label != IGNORE_INDEX]))
        answers = [marked.text[start:end] for start, end in marked.spans]
        ids = [self._writer.encode_ids(answer, is_spelled=marked.is_spelled) for answer in answers]
        expected = squeezed("".join(map(decode, ids)))
        if learned != expected:
            raise Unproven(f"the labels read {learned[:80]!r} where the assistant's text is {expected[:80]!r}")
        plain = unguarded(part)
        for turn, answer in zip(part.learned_turns(), answers, strict=True):
            prompt = self._writer.prompt_ids(self._finder, plain.messages[:turn], tools=plain.tools)
            if not answer[0].isspace() and rendered.input_ids[: len(prompt)] != prompt:
                raise Unproven(
                    f"the tokenizer joins the prompt's end otherwise where {answer[:40]!r} follows than at inference"
                )
