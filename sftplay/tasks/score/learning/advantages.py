"""How much better an episode was than expected. Every function sees the episodes of all ranks: the number of processes
changes nothing."""

from __future__ import annotations

import torch
from torch import Tensor

EPSILON = 1e-4
"""Added to the standard deviation: equal returns give advantages of 0, not of nan."""


def batch_baseline(returns: Tensor, known: Tensor | None = None) -> Tensor:
    """The mean of all known returns, for each episode: [episodes]; nan where none is known.

    `known` is 1 where a return is known, [episodes]; all are without it.
    """
    return (returns if known is None else returns[known > 0]).mean().expand_as(returns)


def leave_one_out_baseline(returns: Tensor, *, group: int, known: Tensor | None = None) -> Tensor:
    """The mean known return of the other episodes of the same problem (RLOO): [episodes]; nan where there is none.

    Episodes of a problem stand together, `group` of them. `known` is as for `batch_baseline`.

    >>> leave_one_out_baseline(torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0]), group=3)
    tensor([0.0000, 0.5000, 0.5000, 1.0000, 0.5000, 0.5000])
    """
    counts = torch.ones_like(returns) if known is None else known
    groups, counted = returns.where(counts > 0, 0.0).view(-1, group), counts.view(-1, group)
    others = counted.sum(1, keepdim=True) - counted
    return ((groups.sum(1, keepdim=True) - groups) / others).reshape(-1)


def advantages(returns: Tensor, baseline: Tensor, *, scales: bool, known: Tensor | None = None) -> Tensor:
    """Returns less their baseline; `scales` divides by the standard deviation (of a sample) of all of them.

    An episode without a known return (`known` as for `batch_baseline`), or without a baseline, has no part in the
    deviation, and its advantage is 0.
    """
    difference = returns - baseline.detach()
    compared = ~difference.isnan() if known is None else ~difference.isnan() & (known > 0)
    if scales and compared.sum() > 1:
        difference = difference / (torch.std(difference[compared]) + EPSILON)
    return difference.where(compared, 0.0)
