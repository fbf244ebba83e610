"""Counts what a rank trains on: tokens, label tokens and losses, of all rows and of each source of a mixture."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sftplay.data.records import IGNORE_INDEX
from sftplay.monitor.interval import StepCounts
from sftplay.tasks.step.model_inputs import Batch


def labels_of(batch: Batch) -> Tensor:
    """Label tokens of each row: int64 [rows]. The first token of a row predicts none."""
    return (batch["labels"][:, 1:] != IGNORE_INDEX).sum(1)


def count_rows(counts: StepCounts, batch: Batch) -> None:
    """Add the rows of a batch."""
    lengths, labels = (each.tolist() for each in (batch["attention_mask"].sum(1), labels_of(batch)))
    counts.tokens += sum(lengths)
    counts.lengths += lengths
    counts.label_tokens += sum(labels)
    counts.rows += batch["row"].tolist()
    if "source" in batch:
        for source, tokens, learned in zip(batch["source"].tolist(), lengths, labels, strict=True):
            of_source = counts.of_source(source)
            of_source.tokens += tokens
            of_source.label_tokens += learned


SourceLoss = tuple[int | None, Tensor]
"""A micro-batch's source, where it is all of one, and its loss."""


def count_losses(counts: StepCounts, losses: Sequence[SourceLoss], *, scale: Tensor | float) -> None:
    """Add losses, each with its source; `scale` makes of a loss the sum over its label tokens."""
    for source, loss in losses:
        loss_sum = loss.detach().double() * scale
        counts.loss_sum = loss_sum if counts.loss_sum is None else counts.loss_sum + loss_sum
        if source is not None:
            counts.of_source(source).add_loss(loss_sum)
