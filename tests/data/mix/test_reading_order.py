"""The order of documents: shuffled in groups, differently in each epoch, the same everywhere, found at once."""

from itertools import islice

from hypothesis import given, settings
from hypothesis import strategies as st

from sftplay.data.mixture.mixture import ReadingOrder
from tests.data.mix.naive_stream import Naive, make_documents, naive_order, philox


def test_the_reference_generator_gives_the_numbers_of_its_authors():
    # Random123 1.14, tests/kat_vectors: philox4x64 10, with key and counter of zeros
    assert philox(0, 0) == [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]


@settings(max_examples=40)
@given(
    n=st.integers(1, 20), group=st.integers(1, 12), seed=st.integers(0, 2**40), source=st.integers(0, 5),
    wanted=st.integers(1, 50),
)  # fmt: skip
def test_documents_are_read_in_the_order_of_a_generator_written_out_by_hand(n, group, seed, source, wanted):
    order = ReadingOrder(make_documents([Naive([1], [False])] * n, group=group), seed=seed, source=source)
    read, number = [], 0
    while len(read) < wanted:
        chunk = order.chunk(number)
        assert chunk.first == len(read)
        read += chunk.documents.tolist()
        number += 1
    read = read[:60]  # one group alone is planned for many epochs
    assert read == list(islice(naive_order(n, group=group, seed=seed, source=source), len(read)))


def test_without_a_seed_documents_are_read_once_in_the_order_of_their_files():
    order = ReadingOrder(make_documents([Naive([1], [False])] * 7, group=3), seed=None)
    assert [order.chunk(number).documents.tolist() for number in range(3)] == [[0, 1, 2], [3, 4, 5], [6]]
    assert order.chunk(3) is None
