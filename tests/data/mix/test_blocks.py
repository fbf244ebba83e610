"""Blocks hold every token once as a new one, and every label that a document teaches, whatever the lengths are."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sftplay.data.mixture.mixture import ChatBlocks, ReadingOrder, TextBlocks
from tests.data.mix.naive_stream import Naive, make_documents, naive_chat_rows, naive_order, naive_text_row

LENGTHS = st.lists(st.integers(1, 8) | st.integers(1, 60), min_size=1, max_size=25)


def make_texts(lengths: list[int]) -> list[Naive]:
    """Documents with distinct ids."""
    return [
        Naive([1000 * number + at for at in range(n)], [at > 0 for at in range(n)]) for number, n in enumerate(lengths)
    ]


def make_chats(learned_flags: list[list[bool]]) -> list[Naive]:
    """Chats with some learned tokens."""
    return [
        Naive([1000 * number + at for at in range(len(flags))], [flag and at > 0 for at, flag in enumerate(flags)])
        for number, flags in enumerate(learned_flags)
    ]


def grow_to(blocks, n):
    """Measure at least `n` blocks; what each teaches."""
    sizes: list[int] = []
    while len(sizes) < n and (found := blocks.grow()) is not None:
        sizes += found.tolist()
    return sizes


def assert_same(row, naive):
    for ours, wanted in zip(row, naive, strict=True):
        assert ours.tolist() == wanted.tolist()
        assert ours.dtype == np.int64


@given(
    lengths=LENGTHS, size=st.integers(2, 40), group=st.integers(1, 9), block=st.integers(0, 30), crosses=st.booleans()
)
def test_any_block_of_texts_equals_that_of_the_whole_stream_laid_out(lengths, size, group, block, crosses):
    texts = make_texts(lengths)
    order = ReadingOrder(make_documents(texts, group=group), seed=3)
    blocks = TextBlocks(order, size, crosses_documents=crosses)
    sizes = grow_to(blocks, block + 1)
    row = blocks.row(block)
    read = naive_order(len(texts), group=group, seed=3, source=0)
    assert_same(row, naive_text_row(texts, read, block=block, size=size, crosses=crosses))
    assert sizes[block] == (row.labels != -100).sum()


@given(
    learned_flags=st.lists(st.lists(st.booleans(), min_size=1, max_size=12), min_size=1, max_size=20),
    room=st.integers(0, 30), group=st.integers(1, 9), n=st.integers(1, 25),
)  # fmt: skip
def test_blocks_of_chats_equal_those_filled_one_chat_after_the_other(learned_flags, room, group, n):
    chats = make_chats(learned_flags)
    size = max(map(len, learned_flags)) + room
    blocks = ChatBlocks(ReadingOrder(make_documents(chats, group=group, is_chat=True), seed=4, source=1), size)
    sizes = grow_to(blocks, n)
    read = naive_order(len(chats), group=group, seed=4, source=1)
    for block, naive in enumerate(naive_chat_rows(chats, read, size=size, n_rows=n)):
        row = blocks.row(block)
        assert_same(row, naive)
        assert sizes[block] == (row.labels != -100).sum()


@pytest.mark.parametrize("unit", ["trainable_tokens", "examples"])
def test_examples_are_counted_in_the_block_in_which_they_begin(unit):
    texts = make_texts([3, 1, 1, 9, 2])
    blocks = TextBlocks(ReadingOrder(make_documents(texts, group=5), seed=None), 5, unit=unit)
    # stream: aaab cddd dddd ddee; first tokens at 0, 3, 4, 5, 14
    assert grow_to(blocks, 9) == ([2, 2, 4, 3] if unit == "trainable_tokens" else [2, 2, 0, 1])


@given(
    learned_flags=st.lists(st.lists(st.booleans(), min_size=1, max_size=12), min_size=1, max_size=20),
    group=st.integers(1, 9),
)
def test_chats_read_once_are_all_there(learned_flags, group):
    chats = make_chats(learned_flags)
    blocks = ChatBlocks(ReadingOrder(make_documents(chats, group=group, is_chat=True), seed=None), 20)
    sizes = grow_to(blocks, 10**6)
    rows = [blocks.row(block) for block in range(len(sizes))]
    assert np.concatenate([row.input_ids for row in rows]).tolist() == [id for chat in chats for id in chat.ids]
    assert sum(sizes) == sum(sum(chat.learned) for chat in chats)


@settings(max_examples=2, deadline=None)
@given(lengths=st.permutations([1, 1_000_000, 17, 1, 40_000, 2]), size=st.sampled_from([2048, 4096, 65_536]))
def test_a_document_of_a_million_tokens_goes_on_over_blocks(lengths, size):
    texts = make_texts([])
    texts = [Naive(list(range(n)), [at > 0 for at in range(n)]) for n in lengths]
    blocks = TextBlocks(ReadingOrder(make_documents(texts, group=2), seed=1), size)
    n_blocks = -(-sum(lengths) // (size - 1))
    grow_to(blocks, n_blocks)
    n_labels = 0
    for block in range(n_blocks):
        row = blocks.row(block)
        is_learned = row.labels != -100
        assert np.array_equal(is_learned, row.position_ids > 0)
        assert np.array_equal(row.input_ids[1:][is_learned[1:]], row.input_ids[:-1][is_learned[1:]] + 1)
        n_labels += int(is_learned.sum())
    end = n_blocks * (size - 1) - sum(lengths)
    assert sum(lengths) - len(lengths) <= n_labels <= sum(lengths) - len(lengths) + end


@given(lengths=LENGTHS, size=st.integers(2, 40), group=st.integers(1, 9), crosses=st.booleans())
def test_texts_read_once_end_in_a_shorter_block_and_lose_nothing(lengths, size, group, crosses):
    texts = make_texts(lengths)
    blocks = TextBlocks(ReadingOrder(make_documents(texts, group=group), seed=None), size, crosses_documents=crosses)
    sizes = grow_to(blocks, 10**6)
    labels = np.concatenate([blocks.row(block).labels for block in range(len(sizes))])
    learned = [id for text in texts for id in text.ids]
    first = 0 if crosses else 1
    expected = learned[1:] if crosses else [id for text in texts for id in text.ids[first:]]
    assert labels[labels != -100].tolist() == expected
    assert sum(sizes) == len(expected)
