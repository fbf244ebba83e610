"""Micro-batches: rows cut and padded, the inputs of the model, and the counts that a step sums up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sftplay.data.records import IGNORE_INDEX
from sftplay.train.interval import StepCounts

Batch = dict[str, Tensor]
SourceLoss = tuple[int | None, Tensor]  # a micro-batch's source, where it is all of one, and its loss

INPUTS = ("input_ids", "attention_mask", "position_ids", "labels")
"""Columns of a batch that the model is given; the others are the kit's."""


def model_inputs(batch: Batch) -> Batch:
    """Return the columns for the model. Positions take the place of the mask."""
    dropped = "attention_mask" if "position_ids" in batch else "position_ids"
    return {key: batch[key] for key in INPUTS if key in batch and key != dropped}


def on_device(batch: Batch, device: Any) -> Batch:
    """Return the batch where the model is. A GPU copies it from page-locked memory while it still computes."""
    if device.type != "cuda":
        return batch
    return {key: value.pin_memory().to(device, non_blocking=True) for key, value in batch.items()}


def count_labels(batch: Batch) -> Tensor:
    """Count the label tokens of each row: int64 [rows]. The first token of a row predicts none."""
    return (batch["labels"][:, 1:] != IGNORE_INDEX).sum(1)


def count_rows(counts: StepCounts, batch: Batch) -> None:
    """Add the rows of a batch."""
    lengths, labels = batch["attention_mask"].sum(1).tolist(), count_labels(batch).tolist()
    counts.tokens += sum(lengths)
    counts.lengths += lengths
    counts.label_tokens += sum(labels)
    counts.rows += batch["row"].tolist()
    if "source" in batch:
        for source, tokens, learned in zip(batch["source"].tolist(), lengths, labels, strict=True):
            counts.of_source(source).tokens += tokens
            counts.of_source(source).label_tokens += learned


@dataclass(frozen=True)
class Collator:
    """Joins rows of token ids into one padded window.

    Gives `input_ids`, `attention_mask`, `labels`: int64 [rows, tokens], and `row`: int64 [rows]. Rows that hold several
    documents bring `position_ids`, rows of a mixture their `source`; both then are in the window too.
    """

    pad_token_id: int

    def __call__(self, rows: Sequence[dict[str, Any]]) -> Batch:
        width = max(len(row["input_ids"]) for row in rows)
        window = {
            "input_ids": torch.full((len(rows), width), self.pad_token_id),
            "attention_mask": torch.zeros((len(rows), width), dtype=torch.int64),
            "labels": torch.full((len(rows), width), IGNORE_INDEX),
        }
        if "position_ids" in rows[0]:
            window["position_ids"] = torch.zeros_like(window["labels"])
        for i, row in enumerate(rows):
            n = len(row["input_ids"])
            window["input_ids"][i, :n] = torch.as_tensor(row["input_ids"])
            window["attention_mask"][i, :n] = 1
            window["labels"][i, :n] = torch.as_tensor(row["labels"])
            if "position_ids" in row:
                # The padding continues the last document, so that a block of one document needs no mask.
                positions = window["position_ids"][i]
                positions[:n] = torch.as_tensor(row["position_ids"])
                positions[n:] = torch.arange(1, width - n + 1) + positions[n - 1]
        return window | {key: torch.tensor([row[key] for row in rows]) for key in ("row", "source") if key in rows[0]}


@dataclass(frozen=True)
class MicroBatcher:
    """Cuts windows into micro-batches of at most `micro_batch` rows: rows of data or, packed, up to `max_tokens` each.

    With `budget_tokens` a micro-batch has as many rows of data as keep rows x longest row within the budget, and at
    least one.
    """

    micro_batch: int
    packs: bool = False
    max_tokens: int = 0
    budget_tokens: int | None = None

    def cut(self, window: Batch) -> Iterator[Batch]:
        """Yield micro-batches of a collated window, longest rows first, so that one that is too large fails at once.

        They hold `input_ids`, `labels` and `attention_mask`. Packed ones hold `position_ids` instead of the mask,
        which start from 0 at each row of data: attention then stays inside each row. The rows of a mixture are cut
        source by source, and each micro-batch holds its `source`.
        """
        lengths = window["attention_mask"].sum(1)
        order = torch.argsort(lengths, descending=True, stable=True)
        if "source" in window:
            sources = window["source"][order]
            for source in sources.unique().tolist():
                for micro_batch in self._cut_padded(window, lengths, order=order[sources == source]):
                    yield micro_batch | {"source": torch.tensor(source)}
        elif self.packs:
            groups = first_fit(lengths.tolist(), order.tolist(), room=self.max_tokens)
            for start in range(0, len(groups), self.micro_batch):
                yield _pack(window, lengths.tolist(), groups=groups[start : start + self.micro_batch])
        else:
            yield from self._cut_padded(window, lengths, order=order)

    def smaller(self, window_rows: int) -> MicroBatcher | None:
        """Return the next smaller one for windows of so many rows; None where every micro-batch is a single row.

        `micro_batch` stays a divisor of the window's rows, so that a resumed run can be given the same sizes.
        """
        if self.micro_batch > 1:
            rows = next(n for n in range(self.micro_batch // 2, 0, -1) if window_rows % n == 0)
            budget = rows * self.max_tokens if self.budget_tokens is not None else None
            return replace(self, micro_batch=rows, budget_tokens=budget)
        if self.packs or self.budget_tokens is not None:
            return MicroBatcher(1, max_tokens=self.max_tokens)
        return None

    def _cut_padded(self, window: Batch, lengths: Tensor, *, order: Tensor) -> Iterator[Batch]:
        start = 0
        while start < len(order):
            width = int(lengths[order[start]])
            count = self.micro_batch
            if self.budget_tokens is not None:
                count = max(1, self.budget_tokens // max(1, width))
            rows = order[start : start + count]
            start += len(rows)
            yield {key: value[rows, :width] for key, value in model_inputs(window).items()}


def first_fit(lengths: Sequence[int], order: Sequence[int], *, room: int) -> list[list[int]]:
    """Put rows into groups of at most `room` tokens; each row goes into the first group with room for it.

    With `order` by falling length this is first-fit decreasing, which needs at most 11/9 of the fewest groups and a few
    more (Johnson 1973). A row longer than `room` gets a group of its own.
    """
    groups: list[list[int]] = []
    left: list[int] = []
    for row in order:
        fits = next((g for g, free in enumerate(left) if lengths[row] <= free), None)
        if fits is None:
            groups.append([row])
            left.append(room - lengths[row])
        else:
            groups[fits].append(row)
            left[fits] -= lengths[row]
    return groups


def _pack(window: Batch, lengths: list[int], *, groups: list[list[int]]) -> Batch:
    width = max(sum(lengths[row] for row in group) for group in groups)
    ids = window["input_ids"].new_zeros((len(groups), width))
    labels = torch.full_like(ids, IGNORE_INDEX)
    # The padding at the end counts positions of its own: for attention it is one more row.
    positions = torch.zeros_like(ids)
    for g, group in enumerate(groups):
        at = 0
        for row in group:
            n = lengths[row]
            ids[g, at : at + n] = window["input_ids"][row, :n]
            labels[g, at + 1 : at + n] = window["labels"][row, 1:n]  # a row's first token has no predecessor
            positions[g, at : at + n] = torch.arange(n, device=ids.device)
            at += n
        positions[g, at:] = torch.arange(width - at, device=ids.device)
    return {"input_ids": ids, "labels": labels, "position_ids": positions}
