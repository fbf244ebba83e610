"""Micro-batches: rows cut and padded, counts of a step, held-out rows, and the proof that documents are isolated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset

from sftplay import log
from sftplay.data.records import IGNORE_INDEX
from sftplay.errors import ConfigError
from sftplay.train.eval_mode import eval_mode
from sftplay.train.loss_heads import PROOF_TOLERANCE
from sftplay.train.metrics import StepCounts
from sftplay.train.upstream import find_attention

Batch = dict[str, Tensor]
SourceLoss = tuple[int | None, Tensor]  # a micro-batch's source, where it is all of one, and its loss

INPUTS = ("input_ids", "attention_mask", "position_ids", "labels")
"""Columns of a batch that the model is given; the others are the kit's."""


def model_inputs(batch: Batch) -> Batch:
    """Return the columns for the model. Positions take the place of the mask."""
    dropped = "attention_mask" if "position_ids" in batch else "position_ids"
    return {key: batch[key] for key in INPUTS if key in batch and key != dropped}


def on_device(batch: Batch, device: Any) -> Batch:
    """Return the batch where the model is. A GPU copies it from page-locked memory while it still computes.

    accelerate has moved the batches of sharded runs already, and only the host's memory can be locked.
    """
    if device.type != "cuda":
        return batch
    pinned = {key: value.pin_memory() if value.device.type == "cpu" else value for key, value in batch.items()}
    return {key: value.to(device, non_blocking=True) for key, value in pinned.items()}


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
            counts.sources[source].tokens += tokens
            counts.sources[source].label_tokens += learned


@dataclass(frozen=True)
class Collator:
    """Joins rows of token ids into one padded window: `input_ids`, `attention_mask`, `labels` int64 [rows, tokens],
    `row` int64 [rows], with `position_ids` where rows hold several documents and `source` where they are mixed.
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

    With `budget_tokens` each has as many rows as keep rows x longest row within the budget, and at least one.
    """

    micro_batch: int
    packs: bool = False
    max_tokens: int = 0
    budget_tokens: int | None = None

    def cut(self, window: Batch) -> Iterator[Batch]:
        """Yield micro-batches of a collated window, longest rows first, so that one that is too large fails at once.

        Packed ones hold `position_ids` instead of the mask, from 0 at each row of data. Rows of a mixture are cut
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
            return replace(self, packs=False, budget_tokens=None)
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
            yield self._take(window, rows, width)

    def _take(self, window: Batch, rows: Tensor, width: int) -> Batch:
        return {key: value[rows, :width] for key, value in model_inputs(window).items()}


def first_fit(lengths: Sequence[int], order: Sequence[int], *, room: int) -> list[list[int]]:
    """Put rows into groups of at most `room` tokens; each row goes into the first group with room for it.

    With `order` by falling length it needs at most 11/9 of the fewest groups (Johnson 1973). A longer row is alone.
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


def labels_per_row(rows: Any) -> float:
    """Return the mean count of label tokens in the held-out rows; 0 without any. With it the Trainer's mean over rows
    becomes the exact mean over label tokens.
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


class HeldOutBlocks(ConcatDataset[dict[str, Any]]):
    """The held-out blocks of all sources, one source after the other."""

    @cached_property
    def label_tokens(self) -> int:
        return sum(int((row["labels"][1:] != IGNORE_INDEX).sum()) for blocks in self.datasets for row in blocks)

    def padded_to(self, multiple: int) -> HeldOutBlocks:
        """Return the same blocks, and behind them blocks without a label, up to a multiple of `multiple`."""
        empty = {**self[0], "labels": np.full_like(self[0]["labels"], IGNORE_INDEX)}
        return HeldOutBlocks([*self.datasets, [empty] * (-len(self) % multiple)])


PROOF_TOKENS = 8  # tokens of each of the two documents


def prove_isolation(trainer: Any, *, key: str, fix: str) -> None:
    """Check that documents of a block, or packed rows, are apart in the trainer's model, as the config's `key` needs.
    Say so where this process cannot compute it. Raise ConfigError, with `fix`, where they are not.
    """
    if not can_compute(trainer.model):
        log.say(f"note: that no row sees another is not proved here ({key}): this process does not hold the weights")
        return
    with trainer.compute_loss_context_manager():
        check_isolation(trainer.model, key=key, fix=fix)


def check_isolation(model: Any, *, key: str, fix: str) -> None:
    """Raise ConfigError where a causal `model` lets a document of a block see another, whatever it says of itself."""
    ids = proof_ids(model)
    positions = torch.arange(PROOF_TOKENS, device=ids.device).repeat(2)[None]
    first, second = slice(0, PROOF_TOKENS), slice(PROOF_TOKENS, None)
    name = type(model.get_base_model() if hasattr(model, "get_base_model") else model).__name__
    with watched_embeddings(model) as seen:
        scores = model(input_ids=ids, position_ids=positions, use_cache=False).logits.float()
        (of_first,) = torch.autograd.grad(scores[:, first].square().sum(), seen, retain_graph=True)
        (of_second,) = torch.autograd.grad(scores[:, second].square().sum(), seen)
    if not (of_first[:, first].any() and of_second[:, second].any()):
        what = f"{name} does not say how its attention follows positions"
    elif of_first[:, second].any() or of_second[:, first].any():
        what = f"{name} lets each document of a block see the ones before it"
    else:
        return
    raise ConfigError(what, where=key, fix=fix)


def can_compute(model: Any) -> bool:
    """Return whether this process can run `model` before the trainer has wrapped it: not where its weights are in
    shards or not loaded, nor where flash attention waits for a GPU.
    """
    device = model.get_input_embeddings().weight.device
    on_hold = any(weight.is_meta or hasattr(weight, "ds_id") for weight in model.parameters())
    return not on_hold and not ("flash" in find_attention(model) and device.type == "cpu")


def needs_no_mask(model: Any, device: torch.device, *, is_half: bool) -> bool:
    """Return whether rows that are padded on the right need no mask, and are faster without one.

    Without one torch takes flash attention, which exists for 16 bits from capability 8.0 on (`sdp_utils.cpp`). A
    router's loss over all tokens, windows that slide, and positions by the mask (ALiBi) keep it.
    """
    config = model.config.get_text_config()
    is_fast = device.type == "cuda" and is_half and torch.cuda.get_device_capability(device) >= (8, 0)
    slides = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    slides = slides or set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    reads_mask = getattr(config, "output_router_logits", False) or getattr(config, "alibi", False)
    reads_mask = reads_mask or config.model_type in ("bloom", "mpt")
    plain = find_attention(model) == "sdpa" and not slides and not reads_mask
    return bool(is_fast and plain and can_compute(model) and ignores_padding(model))


def ignores_padding(model: Any) -> bool:
    """Return whether a few tokens have the same scores without a mask, and no gradient from what follows them."""
    ids = proof_ids(model)
    mask = (torch.arange(2 * PROOF_TOKENS, device=ids.device) < PROOF_TOKENS).long()[None]
    with watched_embeddings(model) as seen:
        masked = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :PROOF_TOKENS].float()
        plain = model(input_ids=ids, use_cache=False).logits[:, :PROOF_TOKENS].float()
        (gradient,) = torch.autograd.grad(plain.square().sum(), seen[-1:])
    absolute = PROOF_TOLERANCE * float(masked.detach().abs().max())
    same = torch.allclose(masked, plain, rtol=PROOF_TOLERANCE, atol=absolute)
    return bool(same) and not gradient[:, PROOF_TOKENS:].any()


def proof_ids(model: Any) -> Tensor:
    """Return a row of ordinary token ids, int64 [1, 2 x PROOF_TOKENS], where `model` is."""
    return torch.arange(2 * PROOF_TOKENS, device=model.get_input_embeddings().weight.device)[None] + 2


@contextmanager
def watched_embeddings(model: Any) -> Iterator[list[Tensor]]:
    """Inside, `model` computes without dropout, and the embeddings of each forward pass are kept as leaves."""
    seen: list[Tensor] = []

    def keep(*hooked: Any) -> Tensor:
        seen.append(hooked[-1].detach().requires_grad_())
        return seen[-1]

    handle = model.get_input_embeddings().register_forward_hook(keep)
    try:
        with eval_mode(model), torch.enable_grad():
            yield seen
    finally:
        handle.remove()
