"""The losses of a segment: of the cells and of the two Q values, a number for each row.

Stablemax: Prieto et al. 2025 (arXiv:2501.04697).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from sftplay.config.schema.hrm import HrmConfig
from sftplay.data.records import IGNORE_INDEX

PRECISIONS = {"fp64": torch.float64, "fp32": torch.float32}
Q_WEIGHT = 0.5
"""Weight of the losses of both Q values."""


def log_stablemax(scores: Tensor) -> Tensor:
    """Logarithms of s(x) / sum of s, with s(x) = x + 1 from 0 on and 1 / (1 - x) below it; of the last dimension.

    s is never 0, and its logarithm is log1p(x) or -log1p(-x): nothing overflows.
    """
    logs = torch.where(scores >= 0, torch.log1p(scores.clamp(min=0)), -torch.log1p(-scores.clamp(max=0)))
    return logs - logs.logsumexp(dim=-1, keepdim=True)


def cell_losses(logits: Tensor, labels: Tensor, *, hrm: HrmConfig) -> Tensor:
    """Mean loss over the labelled cells of each row, [batch]; 0 for a row without a label."""
    scores = logits.to(PRECISIONS[hrm.loss_precision])
    logs = log_stablemax(scores) if hrm.loss == "stablemax" else scores.log_softmax(dim=-1)
    known = labels != IGNORE_INDEX
    picked = logs.gather(-1, labels.clamp(min=0).long().unsqueeze(-1)).squeeze(-1)
    return -(picked * known).sum(dim=-1) / known.sum(dim=-1).clamp(min=1)


def q_losses(q: Tensor, target: Tensor) -> Tensor:
    """Binary cross-entropy of a Q value before its sigmoid, [batch]."""
    return functional.binary_cross_entropy_with_logits(q, target.to(q.dtype), reduction="none")
