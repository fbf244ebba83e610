"""Cuts one rank's window of an optimizer step into micro-batches: sorted by length, padding trimmed, or packed.

A window holds exactly the rows of one optimizer step. How it is cut changes speed and memory, never the loss: the loss
of every micro-batch is divided by the label tokens of the whole window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sftplay.data.records import IGNORE_INDEX
from sftplay.tasks.step.model_inputs import model_inputs


@dataclass(frozen=True)
class Collator:
    """Joins rows of token ids into one padded window.

    Gives `input_ids`, `attention_mask`, `labels`: int64 [rows, tokens], and `row`: int64 [rows]. Rows that hold several
    documents bring `position_ids`, rows of a mixture their `source`; both then are in the window too.
    """

    pad_token_id: int

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        window = self._padded(rows)
        window |= {key: torch.tensor([row[key] for row in rows]) for key in ("row", "source") if key in rows[0]}
        return window

    def _padded(self, rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        width = max(len(row["input_ids"]) for row in rows)
        window = {
            "input_ids": torch.full((len(rows), width), self.pad_token_id),
            "attention_mask": torch.zeros((len(rows), width), dtype=torch.int64),
            "labels": torch.full((len(rows), width), IGNORE_INDEX),
        }
        for i, row in enumerate(rows):
            n = len(row["input_ids"])
            window["input_ids"][i, :n] = torch.as_tensor(row["input_ids"])
            window["attention_mask"][i, :n] = 1
            window["labels"][i, :n] = torch.as_tensor(row["labels"])
        if "position_ids" in rows[0]:
            # The padding continues the last document, so that a block of one document needs no mask. Nobody sees it.
            window["position_ids"] = torch.zeros_like(window["labels"])
            for positions, row in zip(window["position_ids"], rows, strict=True):
                n = len(row["position_ids"])
                positions[:n] = torch.as_tensor(row["position_ids"])
                positions[n:] = torch.arange(1, width - n + 1) + positions[n - 1]
        return window


@dataclass(frozen=True)
class MicroBatcher:
    """How windows are cut: into at most `micro_batch` rows, each a row of data or, packed, up to `max_tokens`.

    With `budget_tokens` a micro-batch has as many rows of data as keep rows x longest row within the budget, and at
    least one.
    """

    micro_batch: int
    packs: bool = False
    max_tokens: int = 0
    budget_tokens: int | None = None

    def cut(self, window: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """Micro-batches of a collated window, longest rows first, so that one that is too large fails at once.

        They hold `input_ids`, `labels` and `attention_mask`. Packed ones hold `position_ids` in place of the mask,
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
            yield from self._cut_packed(window, lengths.tolist(), order=order.tolist())
        else:
            yield from self._cut_padded(window, lengths, order=order)

    def smaller(self, window_rows: int) -> MicroBatcher | None:
        """The next smaller one for windows of so many rows; None where every micro-batch is a single row already.

        `micro_batch` stays a divisor of the window's rows, so that a resumed run can be given the same sizes.
        """
        if self.micro_batch > 1:
            rows = next(n for n in range(self.micro_batch // 2, 0, -1) if window_rows % n == 0)
            budget = rows * self.max_tokens if self.budget_tokens is not None else None
            return replace(self, micro_batch=rows, budget_tokens=budget)
        if self.packs or self.budget_tokens is not None:
            return MicroBatcher(1, max_tokens=self.max_tokens)
        return None

    def _rows_within(self, width: int) -> int:
        """Rows of a micro-batch whose longest row has `width` tokens."""
        if self.budget_tokens is None:
            return self.micro_batch
        return max(1, self.budget_tokens // max(1, width))

    def _cut_padded(self, window: dict[str, Tensor], lengths: Tensor, *, order: Tensor) -> Iterator[dict[str, Tensor]]:
        start = 0
        while start < len(order):
            width = int(lengths[order[start]])
            rows = order[start : start + self._rows_within(width)]
            start += len(rows)
            yield {key: value[rows, :width] for key, value in model_inputs(window).items()}

    def _cut_packed(
        self, window: dict[str, Tensor], lengths: list[int], *, order: list[int]
    ) -> Iterator[dict[str, Tensor]]:
        bins = first_fit(lengths, order, room=self.max_tokens)
        for start in range(0, len(bins), self.micro_batch):
            yield _join(window, lengths, groups=bins[start : start + self.micro_batch])


def first_fit(lengths: Sequence[int], order: Sequence[int], *, room: int) -> list[list[int]]:
    """Rows in groups of at most `room` tokens; each row goes into the first group with room for it.

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


def _join(window: dict[str, Tensor], lengths: list[int], *, groups: list[list[int]]) -> dict[str, Tensor]:
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
