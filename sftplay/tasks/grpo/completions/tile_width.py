"""The buffer in which TRL takes log-probabilities, no wider than the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trl.trainer import utils


@contextmanager
def tiles_as_wide_as(vocab: int) -> Iterator[None]:
    """Meanwhile TRL's forward passes take a buffer of so many columns for each token, where that is fewer than 32768.

    The numbers are the same, because columns beyond the vocabulary are never used. But they take memory. On a CPU they
    are huge pages, which the kernel fills with zeros each time.
    """
    before = utils._CHUNKED_LOGPROB_CHUNK_SIZE
    utils._CHUNKED_LOGPROB_CHUNK_SIZE = min(before, vocab)
    try:
        yield
    finally:
        utils._CHUNKED_LOGPROB_CHUNK_SIZE = before
