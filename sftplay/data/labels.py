"""Marked text -> token ids and labels: the one place where characters become tokens.

Special tokens are found wherever they are spelled, so one typed inside a user's text still becomes a control token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from sftplay.data.masks import Marked
from sftplay.data.templates import Span

IGNORE = -100
"""Label of a token from which nothing is learned; torch's cross entropy leaves it out."""

Refusal = str
"""Why a chat cannot be trained on."""

Placed = tuple[int, Marked | Refusal]
"""Index of a chat, and its text or the reason why it has none."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """One training example, or the reason why a chat gives none."""

    input_ids: list[int]
    labels: list[int]
    """As long as `input_ids`: the same id where it is learned, -100 elsewhere."""

    of: int = 0
    """Index of the chat it came from, in the list that was rendered."""

    problem: Refusal = ""
    """Why the chat cannot be trained on; then both lists are empty."""


def encode(tokenizer: Any, texts: Sequence[str]) -> list[Any]:
    """The `tokenizers.Encoding` of each text, in one call whose threads use all cores.

    A template writes the special tokens already, so none is added and no BOS is doubled; nothing is cut or padded.
    """
    backend = tokenizer.backend_tokenizer
    if backend.truncation is not None:  # many a tokenizer.json cuts and pads by itself
        backend.no_truncation()
    if backend.padding is not None:
        backend.no_padding()
    return cast("list[Any]", backend.encode_batch(list(texts), add_special_tokens=False))


def texts_of(placed: Sequence[Placed]) -> list[str]:
    """The texts that `labelled` expects encodings of."""
    return [found.text for _, found in placed if isinstance(found, Marked)]


def labelled(placed: Sequence[Placed], encodings: Sequence[Any]) -> list[Rendered]:
    """An example for each placed text, in order; those without a text keep their reason."""
    coming = iter(encodings)
    examples = []
    for of, found in placed:
        if isinstance(found, Marked):
            encoding = next(coming)
            ids = encoding.ids
            examples.append(Rendered(ids, _labels(encoding, ids, found), of))
        else:
            examples.append(Rendered([], [], of, found))
    return examples


def _labels(encoding: Any, ids: list[int], marked: Marked) -> list[int]:
    labels = [IGNORE] * len(ids)
    for span in marked.spans:
        first, last = _tokens_of(encoding, marked.text, span)
        labels[first:last] = ids[first:last]
    return labels


def _tokens_of(encoding: Any, text: str, span: Span) -> tuple[int, int]:
    """The tokens that spell the span. One that begins in the prompt counts only if it spells more than white space."""
    start, end = span
    first = encoding.char_to_token(start)
    while first is None and start < end - 1:  # a tokenizer may drop white space
        start += 1
        first = encoding.char_to_token(start)
    last = encoding.char_to_token(end - 1)
    if first is None or last is None:
        return 0, 0
    left, right = encoding.token_to_chars(first)
    if left < span[0] and text[span[0] : right].isspace():
        first += 1
    return first, last + 1
