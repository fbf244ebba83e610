"""Records -> token ids and labels, by a chat template with verified masks.

Training, inspection, evaluation and inference use the same `Renderer`, so inference prompts have exactly the form that
was trained. It cuts nothing and counts nothing; that is done in `tokenize`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from sftplay.data.records import Chat, Message, Record, Text
from sftplay.data.render.labels import Rendered, labelled
from sftplay.data.render.masks import Marked, Method, TurnFinder, Unproven, uses_tools
from sftplay.data.render.templates import ChatTemplate, template_hash
from sftplay.data.render.time_limit import ROW_S, is_used, limited
from sftplay.data.render.verify_masks import MaskMethod, verify_masks
from sftplay.data.render.vocabulary import SpecialTokens, Vocabulary
from sftplay.data.render.writer import NOWHERE, Writer
from sftplay.errors import DataError


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

        Raises DataError: no method holds, or the tokenizer does not give the places of its tokens in a text.
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

        Raises DataError: the template refuses them, or there is none.
        """
        return self._expect_finder().template.render(messages, tools=tools, prompts=True)[0]

    def prompt_ids(self, messages: Sequence[Message], tools: str = "") -> list[int]:
        """Return the tokens that ask the model to answer `messages`; in training the answer follows these same tokens.

        Raises:
            DataError: the template refuses them, or there is none, or they type what cannot be kept apart from control.
        """
        try:
            return self._writer.prompt_ids(self._expect_finder(), messages, tools=tools)
        except Unproven as error:
            raise DataError(str(error), where="the prompt", fix="leave it out there") from error

    def beginning_ids(self, text: str) -> list[int]:
        """Return the tokens of a plain text that the model shall go on writing: as in training, but without an end.

        Raises DataError: the text types what cannot be kept apart from control.
        """
        (found,) = self.render([Text(text, NOWHERE)])
        if found.problem:
            raise DataError(found.problem, where="the text", fix="leave it out there")
        return found.input_ids[:-1]

    def answer_text(self, chat: Chat) -> str:
        """Return what the template writes for the last assistant turn, calls included, without its end token.

        Raises DataError: the chat cannot be trained on.
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
