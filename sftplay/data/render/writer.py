"""Records -> marked texts and prompts -> ids: where guards, template and tokenizer meet.

`verify_masks` tries a template with it, and `render` uses it afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence

from sftplay.data.records import Chat, Message, Source, Text
from sftplay.data.render.escape_special_tokens import SpecialTokenEscaper, unguarded, without_guards
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

    def mark_text(self, record: Text) -> Marked:
        """Return a plain text, all of it to be learned.

        Raises:
            Unproven: the tokenizer has nothing to end it with.
            DataError: it holds a noncharacter.
        """
        if self.vocabulary.eos_id is None:
            raise Unproven("the tokenizer has no EOS token, so a text could not end")
        guarded, n_typed = self.escaper.guarded(record)
        if not self.needs_spelling(n_typed):
            return Marked(record.text, is_whole_text=True)
        spelled, _ = self.escaper.spelled(guarded.text, [])  # type: ignore[union-attr]
        return Marked(spelled, n_escaped=n_typed, is_spelled=True, is_whole_text=True)

    def spell(self, finder: TurnFinder, part: Chat, *, marked: Marked, n_escaped: int = 0) -> Marked:
        """Return the marked text of a guarded chat, ready to be encoded.

        Raises Unproven: the template writes the chat otherwise when what it types is guarded.
        """
        if finder.render_chat(unguarded(part)) != without_guards(marked.text):
            raise Unproven("types a special token at a place where the template looks at the text itself")
        text, spans = self.escaper.spelled(marked.text, marked.spans)
        return Marked(text, spans, n_escaped=n_escaped, is_spelled=True)

    def prompt_ids(self, finder: TurnFinder, messages: Sequence[Message], *, tools: str) -> list[int]:
        """Return the tokens that ask for an answer to `messages`.

        Raises:
            Unproven: what is typed in them cannot be kept apart from control tokens.
            DataError: the template refuses them, or they hold a noncharacter.
        """
        whole = Chat(tuple(messages), NOWHERE, tools=tools)
        guarded, typed = self.escaper.guarded(whole)
        if not isinstance(guarded, Chat) or not self.needs_spelling(typed):
            return self.encode_ids(finder.render_prompt(whole, len(messages)), is_spelled=False)
        text = finder.render_prompt(guarded, len(messages))
        if without_guards(text) != finder.render_prompt(unguarded(guarded), len(messages)):
            raise Unproven("types a special token at a place where the template looks at the text itself")
        return self.encode_ids(self.escaper.spelled(text, [])[0], is_spelled=True)

    def encode_ids(self, text: str, *, is_spelled: bool) -> list[int]:
        """Return the ids of a text, or raise Unproven where a typed special token in it comes out as control."""
        if not is_spelled:
            return list(self.vocabulary.encode([text])[0].ids)
        ids, _, lost = self.vocabulary.encode_spelled(text)
        if lost:
            raise Unproven(f"types {lost!r}, which this tokenizer cannot write as text")
        return ids
