"""The training order of rows, the same on every machine, and how many steps show them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from fractions import Fraction
from random import Random


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
