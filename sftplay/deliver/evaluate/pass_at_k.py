"""pass@k: how likely at least one of k answers is right, estimated without bias from n answers a problem."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, pstdev


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
    """The mean over problems and its standard error.

    It is what a bootstrap over the problems tends to with many draws: the spread of the values over the root of their
    number.
    """
    values = [pass_at_k(k, n=n, right=each) for each in right]
    return fmean(values), pstdev(values) / math.sqrt(len(values))
