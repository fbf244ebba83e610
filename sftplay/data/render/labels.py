"""Marked text -> token ids and labels. Characters become tokens only here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sftplay.data.records import IGNORE_INDEX
from sftplay.data.render.masks import Marked, Unproven
from sftplay.data.render.templates import Span
from sftplay.data.render.vocabulary import Encoded, Vocabulary

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

    Raises Unproven: a token begins in the prompt, and the answer does not begin with white space.
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
