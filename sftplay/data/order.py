"""Keys of content, which rows are held out, and the training order of the others: the same on every machine.

They depend on content and seed alone. Mixing several data sets by weight is not done here.
"""

from __future__ import annotations

import hashlib
import math
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from random import Random

from sftplay.data.records import Record, Text


@dataclass(frozen=True, slots=True)
class Keys:
    """Sixteen bytes each, equal exactly for records with equal content."""

    content: bytes  # the whole content to the character, wherever it came from; the ids of calls do not count
    normal: bytes  # the content without differences of white space, case and Unicode normalisation
    prompt: bytes  # everything before the last answer, in its normal form; of a plain text all of it


def compute_keys(record: Record) -> Keys:
    """Compute the digests that identify the content of a record."""
    n_prompt = None
    if isinstance(record, Text):
        texts = [record.text]
    else:
        texts, last = [record.tools], record.turns()[-1]
        for index, message in enumerate(record.messages):
            n_prompt = len(texts) if index == last else n_prompt
            texts += (message.role, message.content)
            for call in message.calls:
                texts += (call.name, call.arguments)
    folded = [text if text.isascii() else unicodedata.normalize("NFKC", text) for text in texts]
    normal = [" ".join(text.casefold().split()) for text in folded]
    whole = _digest(normal)
    return Keys(_digest(texts), whole, whole if n_prompt is None else _digest(normal[:n_prompt]))


def _digest(texts: Iterable[str]) -> bytes:
    # The length before each text keeps two different contents from running together into one string.
    whole = "".join([f"{len(text)}:{text}" for text in texts])
    return hashlib.sha256(whole.encode("utf-8", "surrogatepass")).digest()[:16]


def is_held_out(keys: Keys, share: float) -> bool:
    """Return True for about `share` of all prompts; a prompt is always on the same side, in any file and order."""
    return int.from_bytes(keys.prompt[:8], "big") < share * 2**64


def training_order(n_rows: int, n_needed: int, *, seed: int) -> list[int]:
    """Return `n_needed` row indices: seeded permutations of all rows, one after the other, the last one broken off.

    Only `Random.random()` is called: it is the one method with a sequence that Python promises never to change
    (docs.python.org/3/library/random.html, "Notes on Reproducibility"); `shuffle` carries no such promise.
    """
    if n_rows < 1:
        raise ValueError("an order needs at least one row")
    order: list[int] = []
    for epoch in range(math.ceil(n_needed / n_rows)):
        generator = Random((seed << 32) | epoch)
        keys = [generator.random() for _ in range(n_rows)]
        order.extend(sorted(range(n_rows), key=keys.__getitem__))
    return order[:n_needed]


def order_hash(order: Iterable[int]) -> str:
    """Return the hex sha256 of the indices as little-endian 64-bit integers; it goes to the manifest."""
    digest = hashlib.sha256()
    for index in order:
        digest.update(index.to_bytes(8, "little"))
    return digest.hexdigest()


def steps_for(n_rows: int, epochs: float, *, effective_batch: int) -> int:
    """Count the optimizer steps that show every row `epochs` times, rounded up to a whole step; at least 1.

    `epochs` is taken as the decimal number that was written: 0.1 of 30 rows is 3 rows, not 3.0000000000000004.
    """
    return max(1, math.ceil(n_rows * Fraction(str(epochs)) / effective_batch))
