"""Marked text -> token ids and labels. Characters become tokens only here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sftplay.data.records import IGNORE_INDEX
from sftplay.data.render.masks import Marked, Unproven
from sftplay.data.render.templates import Span
from sftplay.data.render.vocabulary import Encoded, Vocabulary

SPARE_CHARACTERS, CHARACTERS_A_TOKEN = 1_000_000, 64
"""A text is tokenised up to this many characters, plus this many for each token that can be used."""

EDGE_CHARACTERS = 1_000
"""At this distance from the cut, the tokens of a cut text are those of the whole text; few vocabularies have longer
tokens."""


MANY_EXAMPLES, USUAL_CHARACTERS = 8, 8
"""From this many examples of one record on, their shared beginning is read once. It is searched for in this many
characters for each token that can be used."""


class PlacedText(NamedTuple):
    """A record's text with its spans, or the reason why it has none."""

    record_index: int
    """Index of the record."""

    found: Marked | str
    n_escaped: int = 0
    is_spelled: bool = False
    """The text is spelled by `escape_special_tokens`, because the record types special tokens."""

    is_whole_text: bool = False
    """A plain text, not a chat. The tokenizer's own BOS and an EOS go around it."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """One training example, or the reason why a record gives none."""

    input_ids: list[int]
    labels: list[int]
    """As long as `input_ids`: the same id where it is learned, -100 elsewhere."""

    record_index: int = 0
    """Index of the record it came from, in the list that was rendered."""

    problem: str = ""
    """Why the record cannot be trained on; then both lists are empty."""

    n_escaped: int = 0
    """Number of special tokens that the texts of the record spell; only its first example has the count."""

    joins_prompt: bool = False
    """The problem: a token begins in the prompt and ends in the answer, so the prompt at inference would differ."""

    is_partial: bool = False
    """Only the beginning of a very long text was tokenised; it has more tokens than can be used."""


def labelled(vocabulary: Vocabulary, placed: Sequence[PlacedText], *, max_tokens: int | None = None) -> list[Rendered]:
    """An example for each placed text, in order; those without a text keep their reason."""
    limit = None if max_tokens is None else SPARE_CHARACTERS + CHARACTERS_A_TOKEN * max_tokens
    beginnings = {} if max_tokens is None else _shared_beginnings(vocabulary, placed, max_tokens=max_tokens)
    texts = {
        at: beginning
        if item.found.text.startswith(beginning := beginnings.get(item.record_index, "\0"))
        else item.found.text
        for at, item in enumerate(placed)
        if isinstance(item.found, Marked)
    }
    plain = dict.fromkeys(text[:limit] for at, text in texts.items() if not placed[at].is_spelled)
    known: dict[str, Encoded]
    if limit is None and all(item.is_whole_text for item in placed if isinstance(item.found, Marked)):
        known = {text: Encoded(ids, None) for text, ids in zip(plain, vocabulary.encode_ids(list(plain)), strict=True)}
    else:
        known = {text: _unspelled(found) for text, found in zip(plain, vocabulary.encode(list(plain)), strict=True)}
    examples = []
    for at, item in enumerate(placed):
        if isinstance(item.found, str):
            examples.append(Rendered([], [], item.record_index, item.found))
            continue
        text = texts[at][:limit]
        encoded = vocabulary.encode_spelled(text) if item.is_spelled else known[text]
        is_shared = texts[at] is not item.found.text
        is_enough = len(text) == len(item.found.text) or is_shared
        if not is_enough and _n_sure(encoded.encoding, text) <= (max_tokens or 0):
            # A long text with few tokens, such as white space: its beginning is not enough.
            text = item.found.text
            encoded = vocabulary.encode_spelled(text) if item.is_spelled else _unspelled(vocabulary.encode([text])[0])
        examples.append(_example(vocabulary, item, text=text, encoded=encoded))
    return examples


def _shared_beginnings(vocabulary: Vocabulary, placed: Sequence[PlacedText], *, max_tokens: int) -> dict[int, str]:
    """Record of many examples -> the beginning of its last text, if that alone has more tokens than can be used.

    The examples of a chat that was split begin alike. To read each of them to its end takes quadratic time.
    """
    last: dict[int, PlacedText] = {}
    for item in placed:
        if isinstance(item.found, Marked) and not item.is_spelled:
            last[item.record_index] = item
    counts = Counter(item.record_index for item in placed)
    found = {}
    for index, item in last.items():
        assert isinstance(item.found, Marked)
        text = item.found.text[: USUAL_CHARACTERS * max_tokens + EDGE_CHARACTERS]
        if counts[index] < MANY_EXAMPLES or len(text) == len(item.found.text):
            continue
        (encoding,) = vocabulary.encode([text])
        if _n_sure(encoding, text) > max_tokens:
            end = encoding.token_to_chars(max_tokens)[1] + EDGE_CHARACTERS
            found[index] = text[:end]
    return found


def _example(vocabulary: Vocabulary, placed: PlacedText, *, text: str, encoded: Encoded) -> Rendered:
    """The example of a placed text; `text` is the part of it that was encoded."""
    assert isinstance(placed.found, Marked)
    if encoded.lost:
        return Rendered(
            [], [], placed.record_index, f"types {encoded.lost!r}, which this tokenizer cannot write as text"
        )
    is_partial = len(text) < len(placed.found.text)
    ids = encoded.ids
    if placed.is_whole_text:
        ids, labels = _enclosed(vocabulary, ids, is_partial=is_partial)
    else:
        try:
            labels = _labels(encoded.encoding, ids, text=text, spans=placed.found.spans)
        except Unproven as error:
            return Rendered([], [], placed.record_index, str(error), joins_prompt=True)
    return Rendered(ids, labels, placed.record_index, "", placed.n_escaped, is_partial=is_partial)


def _unspelled(encoding: Any) -> Encoded:
    return Encoded(encoding.ids, encoding)


def _n_sure(encoding: Any, text: str) -> int:
    """Count the tokens at the beginning of a cut text that are surely those of the whole text."""
    return encoding.char_to_token(max(len(text) - EDGE_CHARACTERS, 0)) or 0


def _enclosed(vocabulary: Vocabulary, ids: list[int], *, is_partial: bool) -> tuple[list[int], list[int]]:
    """Ids and labels of a whole text. All is learned except the BOS. A text that was cut gets no EOS."""
    head = list(vocabulary.specials.prefix_ids)
    end = [] if is_partial or vocabulary.eos_id is None else [vocabulary.eos_id]
    return [*head, *ids, *end], [*[IGNORE_INDEX] * len(head), *ids, *end]


def _labels(encoding: Any, ids: list[int], *, text: str, spans: Sequence[Span]) -> list[int]:
    labels = [IGNORE_INDEX] * len(ids)
    for start, end in spans:
        if start < len(text):
            first, last = _find_tokens(encoding, text, span=(start, min(end, len(text))))
            labels[first:last] = ids[first:last]
    return labels


def _find_tokens(encoding: Any, text: str, *, span: Span) -> tuple[int, int]:
    """The tokens that spell the span. A token that begins in the prompt counts only if it spells more than white space.

    Raises:
        Unproven: a token begins in the prompt, and the answer does not begin with white space.
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
