"""Records -> marked texts and prompts -> ids: where guards, template and tokenizer meet.

`verify_masks` tries a template with it, and `render` uses it afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence

from sftplay.data.records import Chat, Message, Source, Text
from sftplay.data.render.escape_special_tokens import SpecialTokenEscaper, unguarded, without_guards
from sftplay.data.render.labels import PlacedText
from sftplay.data.render.masks import Marked, TurnFinder, Unproven
from sftplay.data.render.vocabulary import Vocabulary

NOWHERE = Source("(prompt)", 1)


class Writer:
    """One tokenizer that keeps typed and written special tokens apart."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.escaper = SpecialTokenEscaper(vocabulary.control_tokens)

    def needs_spelling(self, n_typed: int) -> bool:
        """Return whether a text with `n_typed` special tokens must be spelled: they could become control otherwise."""
        return n_typed > 0 or self.vocabulary.folds_text

    def place_text(self, record_index: int, record: Text) -> PlacedText:
        """A plain text, all of it to be learned.

        Raises:
            Unproven: the tokenizer has nothing to end it with.
            DataError: it holds a noncharacter.
        """
        if self.vocabulary.eos_id is None:
            raise Unproven("the tokenizer has no EOS token, so a text could not end")
        guarded, typed = self.escaper.guarded(record)
        if not self.needs_spelling(typed):
            return PlacedText(record_index, Marked(record.text, ()), is_whole_text=True)
        spelled, _ = self.escaper.spelled(guarded.text, [])  # type: ignore[union-attr]
        return PlacedText(record_index, Marked(spelled, ()), typed, is_spelled=True, is_whole_text=True)

    def place_part(self, finder: TurnFinder, part: Chat, *, marked: Marked, placed: PlacedText) -> PlacedText:
        """Return the marked text of a guarded chat, ready to be encoded; `placed` has its record and count.

        Raises:
            Unproven: the template writes the chat otherwise when what it types is guarded.
        """
        if not placed.is_spelled:
            return PlacedText(placed.record_index, marked)
        if finder.render_chat(unguarded(part)) != without_guards(marked.text):
            raise Unproven("types a special token at a place where the template looks at the text itself")
        text, spans = self.escaper.spelled(marked.text, marked.spans)
        return PlacedText(placed.record_index, Marked(text, tuple(spans)), placed.n_escaped, is_spelled=True)

    def prompt_ids(self, finder: TurnFinder, messages: Sequence[Message], *, tools: str) -> list[int]:
        """The tokens that ask for an answer to `messages`.

        Raises:
            Unproven: what is typed in them cannot be kept apart from control tokens.
            DataError: the template refuses them, or they hold a noncharacter.
        """
        whole = Chat(tuple(messages), NOWHERE, tools=tools)
        guarded, typed = self.escaper.guarded(whole)
        if not isinstance(guarded, Chat) or not self.needs_spelling(typed):
            return list(self.vocabulary.encode([finder.render_prompt(whole, len(messages))])[0].ids)
        text = finder.render_prompt(guarded, len(messages))
        if without_guards(text) != finder.render_prompt(unguarded(guarded), len(messages)):
            raise Unproven("types a special token at a place where the template looks at the text itself")
        return self.encode_ids(self.escaper.spelled(text, [])[0], is_spelled=True)

    def encode_ids(self, text: str, *, is_spelled: bool) -> list[int]:
        """The ids of a text.

        Raises:
            Unproven: a typed special token in it comes out as control.
        """
        if not is_spelled:
            return list(self.vocabulary.encode([text])[0].ids)
        read = self.vocabulary.encode_spelled(text)
        if read.lost:
            raise Unproven(f"types {read.lost!r}, which this tokenizer cannot write as text")
        return read.ids
