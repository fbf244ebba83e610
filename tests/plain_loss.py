"""The losses of rows in plain torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.nn import functional


def label_losses(model: Any, row: dict[str, Any], smoothing: float = 0.0) -> torch.Tensor:
    """Those of one row's label tokens: position t predicts token t + 1."""
    scores = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1]
    targets = torch.tensor(row["labels"][1:])
    losses = functional.cross_entropy(scores, targets, reduction="none", ignore_index=-100, label_smoothing=smoothing)
    return losses[targets != -100]


def mean_loss(model: Any, rows: Iterable[dict[str, Any]]) -> float:
    """The mean over the label tokens of all rows, each of the same weight."""
    with torch.no_grad():
        return float(torch.cat([label_losses(model, row) for row in rows]).mean())
