"""The stream of a source, laid out token by token in plain loops: what the mixture's blocks are compared with."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import chain, count, islice
from typing import NamedTuple

import numpy as np

from sftplay.data.mixture.mixture import BlockTokens
from sftplay.data.mixture.store import ENTRY, Documents

M0, M1, W0, W1 = 0xD2E7470EE14C6C93, 0xCA5A826395121157, 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B
WORD = 2**64


class Naive(NamedTuple):
    """A document: its ids, and which of them are learned; its first token never is."""

    ids: list[int]
    learned: list[bool]


class Token(NamedTuple):
    """A token of the stream."""

    id: int
    ordinal: int
    """Number of its document in the stream."""

    place: int
    """In its document."""


def make_documents(texts: Sequence[Naive], *, group: int, is_chat: bool = False) -> Documents:
    """The documents as the mixture keeps them, in groups of `group`."""
    table = np.zeros(len(texts), ENTRY)
    table["end"] = np.cumsum([len(text.ids) for text in texts])
    table["learned_end"] = np.cumsum([sum(text.learned) for text in texts])
    learned = np.array([flag for text in texts for flag in text.learned], np.uint8)
    ends = [*range(group, len(texts), group), len(texts)]
    ids = np.array([id for text in texts for id in text.ids], np.uint32)
    return Documents(ids, table, ends, learned if is_chat else None)


def philox(key: int, counter: int) -> list[int]:
    """Four numbers of Philox4x64-10, as in Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (2011)."""
    key0, key1 = key % WORD, key // WORD
    x = [counter >> (64 * n) & (WORD - 1) for n in range(4)]
    for _ in range(10):
        left, right = M0 * x[0], M1 * x[2]
        x = [(right // WORD) ^ x[1] ^ key0, right % WORD, (left // WORD) ^ x[3] ^ key1, left % WORD]
        key0, key1 = (key0 + W0) % WORD, (key1 + W1) % WORD
    return x


def naive_order(n: int, *, group: int, seed: int, source: int) -> Iterator[int]:
    """Document numbers in reading order, without an end."""
    for epoch in count():
        for number, first in enumerate(range(0, n, group)):
            size = min(group, n - first)
            key = int.from_bytes(
                hashlib.blake2b(f"{seed} {source} {number}".encode(), digest_size=16).digest(), "little"
            )
            # numpy's generator counts up before it draws
            numbers = [philox(key, epoch * -(-size // 4) + place + 1) for place in range(-(-size // 4))]
            keys = list(chain.from_iterable(numbers))[:size]
            yield from (first + place for place in sorted(range(size), key=keys.__getitem__))


def naive_text_row(
    texts: Sequence[Naive], order: Iterator[int], *, block: int, size: int, crosses: bool
) -> BlockTokens:
    """One block of joined documents; the whole stream up to it is laid out."""
    stream = islice(_tokens(texts, order), (block + 1) * (size - 1))
    tokens = list(stream)
    row: list[tuple[int, int, int]] = []
    for at in range(block * (size - 1), len(tokens)):
        token, before = tokens[at], tokens[at - 1] if at else None
        has_context = before is not None and (crosses or before.ordinal == token.ordinal)
        if not row and has_context:
            assert before is not None
            row.append((before.id, -100, 0))
        position = row[-1][2] + 1 if row and has_context else 0
        row.append((token.id, token.id if has_context else -100, position))
    return BlockTokens(*(np.array(column, np.int64) for column in zip(*row, strict=True)))


def naive_chat_rows(chats: Sequence[Naive], order: Iterator[int], *, size: int, n_rows: int) -> list[BlockTokens]:
    """The first blocks of whole chats; a chat that does not fit begins the next one."""
    rows: list[list[tuple[int, int, int]]] = [[]]
    for number in order:
        chat = chats[number]
        if len(rows[-1]) + len(chat.ids) > size:
            if len(rows) == n_rows:
                break
            rows.append([])
        labels = [id if learned and at else -100 for at, (id, learned) in enumerate(zip(*chat, strict=True))]
        rows[-1] += zip(chat.ids, labels, range(len(chat.ids)), strict=True)
    return [BlockTokens(*(np.array(column, np.int64) for column in zip(*row, strict=True))) for row in rows]


def _tokens(texts: Sequence[Naive], order: Iterator[int]) -> Iterator[Token]:
    for ordinal, number in enumerate(order):
        for place, id in enumerate(texts[number].ids):
            yield Token(id, ordinal, place)
