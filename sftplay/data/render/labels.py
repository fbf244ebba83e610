"""Text with its spans becomes token ids and labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sftplay.data.records import IGNORE_INDEX, Chat, Message, Source, Text
from sftplay.data.render.masks import Marked, TurnFinder, Unproven
from sftplay.data.render.templates import Span
from sftplay.data.render.vocabulary import Encoded, SpecialTokenEscaper, Vocabulary, unguarded, without_guards

SPARE_CHARACTERS, CHARACTERS_A_TOKEN = 1_000_000, 64
"""A text is tokenised up to this many characters, plus this many for each token that can be used."""

EDGE_CHARACTERS = 1_000
"""So far from the cut, the tokens of a cut text are those of the whole text; few vocabularies have longer ones."""

MANY_EXAMPLES, USUAL_CHARACTERS = 8, 8
"""From this many examples of one record on, their shared beginning is read once. It is searched for in this many
characters for each token that can be used."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """One training example, or the reason why a record gives none."""

    input_ids: list[int]
    labels: list[int]  # as long as `input_ids`: the same id where it is learned, -100 elsewhere
    record_index: int = 0  # index of the record it came from, in the list that was rendered
    problem: str = ""  # why the record cannot be trained on; then both lists are empty
    n_escaped: int = 0
    """Number of special tokens that the texts of the record spell; only its first example has the count."""

    joins_prompt: bool = False
    """The problem: a token begins in the prompt and ends in the answer, so the prompt at inference would differ."""

    is_partial: bool = False
    """Only the beginning of a very long text was tokenised; it has more tokens than can be used."""


def labelled(
    vocabulary: Vocabulary, groups: Sequence[Sequence[Marked]], *, max_tokens: int | None = None
) -> list[Rendered]:
    """Return an example for each marked text of each record, in order; those without a text keep their reason."""
    limit = None if max_tokens is None else SPARE_CHARACTERS + CHARACTERS_A_TOKEN * max_tokens
    items, texts = [], []
    for index, group in enumerate(groups):
        beginning = None if max_tokens is None else _find_shared_beginning(vocabulary, group, max_tokens=max_tokens)
        for marked in group:
            items.append((index, marked))
            texts.append(beginning if beginning and marked.text.startswith(beginning) else marked.text)
    is_plain = [not (marked.is_spelled or marked.problem) for _, marked in items]
    plain = list(dict.fromkeys(text[:limit] for text, is_read in zip(texts, is_plain, strict=True) if is_read))
    known: dict[str, Encoded]
    if limit is None and all(marked.is_whole_text for _, marked in items if not marked.problem):
        known = {text: (ids, None, "") for text, ids in zip(plain, vocabulary.encode_ids(plain), strict=True)}
    else:
        known = {text: (found.ids, found, "") for text, found in zip(plain, vocabulary.encode(plain), strict=True)}
    examples = []
    for (index, marked), shared in zip(items, texts, strict=True):
        if marked.problem:
            examples.append(Rendered([], [], index, marked.problem))
            continue
        text = shared[:limit]
        encoded = vocabulary.encode_spelled(text) if marked.is_spelled else known[text]
        is_enough = len(text) == len(marked.text) or shared is not marked.text
        if not is_enough and _n_sure(encoded[1], text) <= (max_tokens or 0):
            # A long text with few tokens, such as white space: its beginning is not enough.
            text = marked.text
            if marked.is_spelled:
                encoded = vocabulary.encode_spelled(text)
            else:
                (encoding,) = vocabulary.encode([text])
                encoded = encoding.ids, encoding, ""
        examples.append(_make_example(vocabulary, index, marked=marked, text=text, encoded=encoded))
    return examples


def _find_shared_beginning(vocabulary: Vocabulary, group: Sequence[Marked], *, max_tokens: int) -> str | None:
    """Return the beginning of a record's last text, if that alone has more tokens than can be used.

    The examples of a chat that was split begin alike. To read each of them to its end takes quadratic time.
    """
    if len(group) < MANY_EXAMPLES:
        return None
    whole = next((marked.text for marked in reversed(group) if not (marked.is_spelled or marked.problem)), "")
    text = whole[: USUAL_CHARACTERS * max_tokens + EDGE_CHARACTERS]
    if len(text) == len(whole):
        return None
    (encoding,) = vocabulary.encode([text])
    if _n_sure(encoding, text) <= max_tokens:
        return None
    return text[: encoding.token_to_chars(max_tokens)[1] + EDGE_CHARACTERS]


def _make_example(vocabulary: Vocabulary, index: int, *, marked: Marked, text: str, encoded: Encoded) -> Rendered:
    """Return the example of a marked text of record `index`; `text` is the part of it that was encoded."""
    ids, encoding, lost = encoded
    if lost:
        return Rendered([], [], index, f"types {lost!r}, which this tokenizer cannot write as text")
    is_partial = len(text) < len(marked.text)
    if marked.is_whole_text:  # all is learned except the BOS; a text that was cut gets no EOS
        head = list(vocabulary.specials.prefix_ids)
        end = [] if is_partial or vocabulary.eos_id is None else [vocabulary.eos_id]
        ids, labels = [*head, *ids, *end], [*[IGNORE_INDEX] * len(head), *ids, *end]
        return Rendered(ids, labels, index, "", marked.n_escaped, is_partial=is_partial)
    labels = [IGNORE_INDEX] * len(ids)
    try:
        for start, stop in marked.spans:
            if start < len(text):
                first, last = _find_tokens(encoding, text, span=(start, min(stop, len(text))))
                labels[first:last] = ids[first:last]
    except Unproven as error:
        return Rendered([], [], index, str(error), joins_prompt=True)
    return Rendered(ids, labels, index, "", marked.n_escaped, is_partial=is_partial)


def _n_sure(encoding: Any, text: str) -> int:
    """Count the tokens at the beginning of a cut text that are surely those of the whole text."""
    return encoding.char_to_token(max(len(text) - EDGE_CHARACTERS, 0)) or 0


def _find_tokens(encoding: Any, text: str, *, span: Span) -> tuple[int, int]:
    """Find the tokens that spell the span; one that begins in the prompt counts if it spells more than white space.
    Raise Unproven where a token begins in the prompt, and the answer does not begin with white space.
    """
    start, end = span
    first = encoding.char_to_token(start)
    while first is None and start < end - 1:  # a tokenizer may drop white space
        start += 1
        first = encoding.char_to_token(start)
    last = encoding.char_to_token(end - 1)
    if first is None or last is None:
        return 0, 0
    left, right = encoding.token_to_chars(first)
    if left < span[0]:
        if not text[span[0]].isspace():  # white space may share a token with the prompt, as in `proof`
            answer = text[span[0] : span[0] + 40]
            raise Unproven(f"the tokenizer joins the prompt's end otherwise where {answer!r} follows than at inference")
        first += text[span[0] : right].isspace()
    return first, last + 1


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
        Raise Unproven where the tokenizer has nothing to end it with; DataError where it holds a noncharacter.
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
        Raise Unproven where the template writes the chat otherwise when what it types is guarded.
        """
        if finder.render_chat(unguarded(part)) != without_guards(marked.text):
            raise Unproven("types a special token at a place where the template looks at the text itself")
        text, spans = self.escaper.spelled(marked.text, marked.spans)
        return Marked(text, spans, n_escaped=n_escaped, is_spelled=True)

    def prompt_ids(self, finder: TurnFinder, messages: Sequence[Message], *, tools: str) -> list[int]:
        """Return the tokens that ask for an answer to `messages`.
        Raise Unproven where what is typed in them cannot be kept apart from control tokens; DataError where the
        template refuses them, or they hold a noncharacter.
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
