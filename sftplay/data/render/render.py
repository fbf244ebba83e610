"""Render a record by the chat template, with masks that are verified first."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import Tokenizer

from sftplay.data.records import IGNORE_INDEX, Chat, Message, Record, Text
from sftplay.data.render.masks import (
    NOWHERE,
    Marked,
    Method,
    Rendered,
    TurnFinder,
    Unproven,
    Writer,
    labelled,
    squeezed,
    uses_tools,
)
from sftplay.data.render.templates import (
    OPENINGS,
    ROW_S,
    ChatTemplate,
    TemplateTraits,
    content_forms,
    find_closings,
    is_used,
    limited,
    probe_chats,
    template_hash,
    tool_probe_chats,
)
from sftplay.data.render.vocabulary import GUARD, SpecialTokens, Vocabulary, unguarded
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
    Raise DataError where none holds.
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


@dataclass(frozen=True)
class Recipe:
    """Everything a renderer is made of, as plain data: it travels to processes that have no transformers."""

    tokenizer: str  # the tokenizer's JSON, as the tokenizers library writes it
    specials: SpecialTokens
    template: str | None  # the chat template's text; None where only texts are rendered
    proven: MaskMethod | None


class Renderer:
    """A tokenizer, a chat template and the method proven to find the assistant's turns.

    Made by `Renderer.prove`, or by `Renderer.from_recipe` of what another has proven.
    """

    def __init__(
        self, vocabulary: Vocabulary, template: str | None, *, proven: MaskMethod | None, tokenizer: Any = None
    ) -> None:
        self.tokenizer = tokenizer
        """The transformers tokenizer it was proven with; None in a renderer made from a recipe."""

        self.template = template
        self.template_hash = template_hash(template or "")
        self._writer = Writer(vocabulary)
        self._proven = proven
        self._finder: TurnFinder | None = None
        if template is not None and proven is not None:
            compiled = ChatTemplate(template, vocabulary.specials.named, traits=proven.traits)
            self._finder = TurnFinder(compiled, vocabulary.special_tokens, ends=proven.ends)

    @classmethod
    def prove(cls, tokenizer: Any, template: str | None, *, samples: Sequence[Record]) -> Renderer:
        """Return a renderer with the first of three mask methods that holds on the probe chats and on `samples`.

        Without a template only texts can be rendered; a chat then has a problem.
        Raise DataError where no method holds, or the tokenizer does not give the places of its tokens in a text.
        """
        if not getattr(tokenizer, "is_fast", False):
            what = "this tokenizer does not give the places of its tokens in the text"
            raise DataError(what, where="model.name", fix="use a model with a tokenizer.json")
        vocabulary, proven = Vocabulary.from_tokenizer(tokenizer), None
        if template is not None:
            compiled = ChatTemplate(template, vocabulary.specials.named)
            chats = _drop_late(compiled, [sample for sample in samples if isinstance(sample, Chat)])
            with limited():
                try:
                    proven = verify_masks(Writer(vocabulary), compiled, samples=chats)
                except DataError as error:
                    raise (_endless() if is_used() else error) from None
        return cls(vocabulary, template, proven=proven, tokenizer=tokenizer)

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> Renderer:
        """Return a renderer that renders exactly as the one this recipe is from; nothing is verified again."""
        vocabulary = Vocabulary(Tokenizer.from_str(recipe.tokenizer), recipe.specials)
        return cls(vocabulary, recipe.template, proven=recipe.proven)

    def recipe(self) -> Recipe:
        """Return what another process needs to make an equal renderer; it can be pickled."""
        vocabulary = self._writer.vocabulary
        return Recipe(vocabulary.to_json(), vocabulary.specials, self.template, self._proven)

    @property
    def method(self) -> str:
        """The method that finds the assistant's turns: markers, sentinels or prefixes; none without a template."""
        return self._proven.method if self._proven else "none"

    @property
    def rewrites_turns(self) -> bool:
        """Return True if the template writes a turn differently once others follow it."""
        return self._proven is not None and self._proven.rewrites_turns

    @property
    def end_token_ids(self) -> list[int]:
        """Ids of the tokens that end an assistant turn, or a text; generation stops at any of them."""
        vocabulary = self._writer.vocabulary
        if self._proven is None:
            return [] if vocabulary.eos_id is None else [vocabulary.eos_id]
        return sorted({encoding.ids[-1] for encoding in vocabulary.encode(self._proven.ends)})

    def render(self, records: Sequence[Record], max_tokens: int | None = None) -> list[Rendered]:
        """Return the examples of `records`, in order: one a record, several where a chat had to be split.

        A record that cannot be trained on gives an example with a `problem`. With `max_tokens`, only the beginning of
        a far longer text is tokenised.
        """
        return labelled(self._writer.vocabulary, [self._mark(record) for record in records], max_tokens=max_tokens)

    def prompt_text(self, messages: Sequence[Message], tools: str = "") -> str:
        """Return the text that asks the model to answer `messages`.
        Raise DataError where the template refuses them, or there is none.
        """
        return self._expect_finder().template.render(messages, tools=tools, prompts=True)[0]

    def prompt_ids(self, messages: Sequence[Message], tools: str = "") -> list[int]:
        """Return the tokens that ask the model to answer `messages`; in training the answer follows these same tokens.
        Raise DataError where the template refuses them, or there is none, or they type what cannot be kept apart from
        control.
        """
        try:
            return self._writer.prompt_ids(self._expect_finder(), messages, tools=tools)
        except Unproven as error:
            raise DataError(str(error), where="the prompt", fix="leave it out there") from error

    def beginning_ids(self, text: str) -> list[int]:
        """Return the tokens of a plain text that the model shall go on writing: as in training, but without an end.
        Raise DataError where the text types what cannot be kept apart from control.
        """
        (found,) = self.render([Text(text, NOWHERE)])
        if found.problem:
            raise DataError(found.problem, where="the text", fix="leave it out there")
        return found.input_ids[:-1]

    def answer_text(self, chat: Chat) -> str:
        """Return what the template writes for the last assistant turn, calls included, without its end token.
        Raise DataError where the chat cannot be trained on.
        """
        finder = self._expect_finder()
        last = chat.turns_apart()[-1]
        try:
            ((_, marked),) = finder.place(last, self._choose_method(last), rewrites=False)
        except Unproven as error:
            raise DataError(str(error), where=str(chat.source), fix="correct the row") from error
        start, end = marked.spans[0]
        answer = marked.text[start:end]
        return next((answer.removesuffix(end) for end in finder.ends if answer.endswith(end)), answer).strip()

    def _mark(self, record: Record) -> list[Marked]:
        try:
            if isinstance(record, Text):
                return [self._writer.mark_text(record)]
            with limited():
                finder = self._expect_finder()
                guarded, n_typed = self._writer.escaper.guarded(record)
                assert isinstance(guarded, Chat)
                parts = finder.place(guarded, self._choose_method(record), rewrites=self.rewrites_turns)
                if not self._writer.needs_spelling(n_typed):
                    return [marked for _, marked in parts]
                # Only the first example of a record has the count.
                counts = [n_typed] + [0] * (len(parts) - 1)
                return [
                    self._writer.spell(finder, part, marked=marked, n_escaped=count)
                    for (part, marked), count in zip(parts, counts, strict=True)
                ]
        except DataError as error:
            return [Marked("", problem=error.what)]
        except Unproven as error:
            return [Marked("", problem=str(error))]

    def _choose_method(self, chat: Chat) -> Method:
        assert self._proven is not None
        return self._proven.tool_method if uses_tools(chat) else self._proven.method

    def _expect_finder(self) -> TurnFinder:
        if self._finder is None:
            fix = "set data.template, or give data.format: text"
            raise DataError("is a chat, and there is no chat template", where="data.template", fix=fix)
        return self._finder


def _drop_late(template: ChatTemplate, samples: Sequence[Chat]) -> list[Chat]:
    """Return the samples that render in time. One that does not is refused later, as a row; two refuse the template."""
    late: list[Chat] = []
    for sample in samples:
        with limited():
            with suppress(DataError):
                template.render(sample.messages, tools=sample.tools)
            late += [sample] if is_used() else []
        if len(late) == 2:
            raise _endless()
    return [sample for sample in samples if sample not in late]


def _endless() -> DataError:
    what = f"the chat template does not come to an end: it took {ROW_S:g} s on a few chats"
    return DataError(what, where="data.template", fix="set data.template: chatml, or correct the template's loops")
