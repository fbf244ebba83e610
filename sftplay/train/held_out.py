"""Held-out rows: those of a mixture, how many labels rows have, and the loss of each source."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sftplay.data.records import IGNORE_INDEX
from sftplay.train.micro_batches import Batch


def labels_per_row(rows: Any) -> float:
    """Return the mean count of label tokens in the held-out rows; 0 without any. A row's first token predicts no label.

    Rows may know the sum of their label tokens as `label_tokens`. With the result the Trainer's mean over rows becomes
    the exact mean over label tokens.
    """
    if rows is None or len(rows) == 0:
        return 0.0
    counted = getattr(rows, "label_tokens", None)
    if counted is None:
        counted = sum(sum(label != IGNORE_INDEX for label in row[1:]) for row in rows["labels"])
    return counted / len(rows)


def split_by_source(batch: Batch) -> Iterator[tuple[int | None, Batch]]:
    """Yield the rows of a batch source by source; all at once where they have no sources."""
    if "source" not in batch:
        yield None, batch
        return
    for source in batch["source"].unique().tolist():
        rows = batch["source"] == source
        yield source, {key: value[rows] for key, value in batch.items()}


def gather_source_losses(sums: Tensor, names: Sequence[str], *, device: torch.device) -> dict[str, dict[str, float]]:
    """Map each source to `loss` (mean over label tokens) and `label_tokens` of all ranks; sources without are left out.

    `sums` are this rank's sums of losses and label tokens, fp64 [sources, 2]. Every rank must call it.
    """
    sums = sums.to(device)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(sums)
    return {
        name: {"loss": total / count, "label_tokens": int(count)}
        for name, (total, count) in zip(names, sums.tolist(), strict=True)
        if count
    }


class HeldOutBlocks:
    """The held-out blocks of all sources, one source after the other, as a map-style data set."""

    def __init__(self, sources: Sequence[Any], *, n_rows: int | None = None) -> None:
        self._sources = sources
        self._n_blocks = sum(len(blocks) for blocks in sources)
        self._n_rows = self._n_blocks if n_rows is None else n_rows

    @cached_property
    def label_tokens(self) -> int:
        """Label tokens of all blocks."""
        return sum(int((row["labels"][1:] != IGNORE_INDEX).sum()) for blocks in self._sources for row in blocks)

    def __len__(self) -> int:
        return self._n_rows

    def __getitem__(self, row: int) -> dict[str, Any]:
        if not 0 <= row < self._n_rows:
            raise IndexError(row)
        if row >= self._n_blocks:
            first = self[0]
            return {**first, "labels": np.full_like(first["labels"], IGNORE_INDEX)}
        source = 0
        while row >= len(self._sources[source]):
            row -= len(self._sources[source])
            source += 1
        found: dict[str, Any] = self._sources[source][row]
        return found

    def padded_to(self, multiple: int) -> HeldOutBlocks:
        """Return the same blocks, and behind them blocks without a label, up to a multiple of `multiple`."""
        rows = -(-self._n_blocks // multiple) * multiple
        padded = HeldOutBlocks(self._sources, n_rows=rows)
        padded.label_tokens = self.label_tokens
        return padded
