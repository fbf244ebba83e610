"""pass@k: how likely at least one of k answers is right, estimated without bias from n answers a problem."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from statistics import fmean, pstdev

DRAWS = 1000
"""Draws of the bootstrap; the standard error then has two reliable digits."""


def pass_at_k(k: int, *, n: int, right: int) -> float:
    """1 - C(n - right, k) / C(n, k): the chance that k of the n answers, drawn without putting back, hold a right one.

    Source: Chen et al. 2021, arXiv 2107.03374, equation 1.

    >>> pass_at_k(1, n=10, right=3)
    0.3

    Raises:
        ValueError: k is larger than n, where no estimate is possible.
    """
    if not 1 <= k <= n or not 0 <= right <= n:
        raise ValueError(f"pass@{k} cannot be estimated from {right} right of {n} answers")
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def mean_pass_at_k(right: Sequence[int], *, n: int, k: int) -> tuple[float, float]:
    """The mean over problems and its standard error, by a bootstrap over the problems with a fixed seed."""
    values = [pass_at_k(k, n=n, right=each) for each in right]
    draw = Random(0).random
    means = [fmean(values[int(draw() * len(values))] for _ in values) for _ in range(DRAWS)]
    return fmean(values), pstdev(means)
