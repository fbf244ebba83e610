"""Random numbers that belong to one puzzle: they stay when other puzzles come or go."""

from __future__ import annotations

import hashlib

import numpy as np


def stream_of(mark: bytes, seed: int) -> np.random.Generator:
    """The stream of the puzzle that `mark` tells from all others."""
    number = int.from_bytes(hashlib.sha256(mark).digest()[:8], "big")
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, number])))
