"""How much better an episode was than expected. Every function sees the episodes of all ranks: the number of processes
changes nothing."""

from __future__ import annotations

import torch
from torch import Tensor

EPSILON = 1e-4
"""Added to the standard deviation: equal returns give advantages of 0, not of nan."""


def batch_baseline(returns: Tensor) -> Tensor:
    """The mean of all returns, for each episode: [episodes]."""
    return returns.mean().expand_as(returns)


def leave_one_out_baseline(returns: Tensor, *, group: int) -> Tensor:
    """The mean return of the other episodes of the same problem (RLOO): [episodes].

    Episodes of a problem stand together, `group` of them.

    >>> leave_one_out_baseline(torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0]), group=3)
    tensor([0.0000, 0.5000, 0.5000, 1.0000, 0.5000, 0.5000])
    """
    groups = returns.view(-1, group)
    return ((groups.sum(1, keepdim=True) - groups) / (group - 1)).reshape(-1)


def advantages(returns: Tensor, baseline: Tensor, *, scales: bool) -> Tensor:
    """Returns less their baseline; `scales` divides by the standard deviation (of a sample) of all of them."""
    difference = returns - baseline.detach()
    return difference / (torch.std(difference) + EPSILON) if scales and len(difference) > 1 else difference
