"""Completions of an optimizer step ordered by length, and each micro-batch cut to its own width: less padding.

TRL pads a whole drawing to its longest prompt and completion, and cuts it in random order. Here the rows of a step
stay the rows of that step, on the same rank. Only which of them share a micro-batch changes, and how wide it is. Loss
and gradient are those of TRL to the last bits of rounding, wherever the loss is a sum over rows: see `depends_on_cut`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Batch = dict[str, Any]

PROMPT_KEYS = ("prompt_ids", "prompt_mask")
COMPLETION_KEYS = (
    "completion_ids", "completion_mask", "old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps",
    "importance_sampling_ratio", "tool_mask",
)  # fmt: skip
ROW_KEYS = ("advantages", "row")
WINDOW_KEYS = ("num_items_in_batch",)
"""What a micro-batch of texts holds. One with anything else (images) is left as it is."""


def depends_on_cut(trainer: Any) -> str:
    """Why the loss of this GRPO trainer depends on which rows share a micro-batch; empty where it does not.

    The mean of equally large micro-batches is the mean over rows in loss types grpo, sapo, luspo and dr_grpo. dapo,
    cispo and vespo divide the sum over tokens by a number of the whole drawing. Ratios, clipping, the off-policy mask
    and KL are of a token or of a row. (trl 1.16, GRPOTrainer._compute_loss.)
    """
    if trainer.loss_type == "bnpo":
        return "loss_type bnpo divides by the tokens of the micro-batch"
    if trainer.top_entropy_quantile < 1.0:
        return "top_entropy_quantile compares the tokens of a micro-batch"
    if trainer._entropy_bonus_enabled:
        return "the entropy bonus is a mean over the tokens of the micro-batch"
    if trainer.aux_loss_enabled:
        return "the router's loss is one of the micro-batch"
    return ""


def order_by_length(batches: Sequence[Batch], *, accum: int, trims_prompts: bool) -> list[Batch]:
    """The micro-batches of a drawing, `accum` of them an optimizer step, with their rows ordered anew in each step.

    The longest come first, so that memory runs out in the first micro-batch or never. `trims_prompts`: whether the
    model gives the same where a prompt has less padding on its left; one that learns a vector for each place does not.
    """
    known = {*PROMPT_KEYS, *COMPLETION_KEYS, *ROW_KEYS, *WINDOW_KEYS}
    if len(batches) % accum or any(set(batch) - known for batch in batches):
        return list(batches)
    trim = trim_padding if trims_prompts else trim_completions
    ordered: list[Batch] = []
    for first in range(0, len(batches), accum):
        ordered += [trim(batch) for batch in _order_step(batches[first : first + accum])]
    return ordered


def trim_padding(batch: Batch) -> Batch:
    """Without the columns that are padding in every row: of prompts on the left, of completions on the right."""
    width = _widest(batch["prompt_mask"])
    prompts = {key: batch[key][:, batch[key].size(1) - width :] for key in PROMPT_KEYS}
    return trim_completions({**batch, **prompts})


def trim_completions(batch: Batch) -> Batch:
    """As `trim_padding`, of the completions alone."""
    full = batch["completion_mask"].size(1)
    width = _widest(batch["completion_mask"])
    cut = {
        key: batch[key][:, :width]
        for key in COMPLETION_KEYS
        if batch.get(key) is not None and batch[key].size(1) == full  # a ratio may be one of a row
    }
    return {**batch, **cut}


def has_relative_places(model: Any) -> bool:
    """True where attention knows places by their distance alone (rotary embeddings), so that padding on the left does
    not change a row."""
    return any("rotary" in type(module).__name__.lower() for module in model.modules())


def padded_tokens(prompts: Sequence[int], completions: Sequence[int], *, rows: int) -> int:
    """Tokens of the micro-batches of `rows` rows each, in this order, after `trim_padding`."""
    return sum(
        rows * (max(prompts[at : at + rows]) + max(completions[at : at + rows])) for at in range(0, len(prompts), rows)
    )


def _order_step(batches: Sequence[Batch]) -> list[Batch]:
    """The same rows in as many micro-batches of the same size, in the best of three orders by length."""
    whole = {key: _joined(key, [batch[key] for batch in batches]) for key in batches[0]}
    rows = len(batches[0]["advantages"])
    prompts = whole["prompt_mask"].sum(1).tolist()
    completions = whole["completion_mask"].sum(1).tolist()
    keys: tuple[Callable[[int], Any], ...] = (
        lambda n: (-completions[n], -prompts[n]),
        lambda n: -prompts[n] - completions[n],
        lambda n: (-prompts[n], -completions[n]),
    )
    numbers = range(len(prompts))
    orders = [list(numbers), *(sorted(numbers, key=key) for key in keys)]
    best = min(
        orders, key=lambda order: padded_tokens([prompts[n] for n in order], [completions[n] for n in order], rows=rows)
    )
    parts = torch.tensor(best, device=whole["advantages"].device).split(rows)
    return [{key: _chosen(value, part) for key, value in whole.items()} for part in parts]


def _joined(key: str, values: Sequence[Any]) -> Any:
    return values[0] if key in WINDOW_KEYS or values[0] is None else torch.cat(list(values))


def _chosen(value: Any, rows: Tensor) -> Any:
    return value if value is None or value.ndim == 0 else value[rows]


def _widest(mask: Tensor) -> int:
    """Columns up to the last one that any row uses; at least 1."""
    return max(1, int(mask.sum(1).max()))


def share_of_padding(batches: Sequence[Mapping[str, Any]]) -> float:
    """Padding over all tokens of the micro-batches."""
    real = sum(int(batch["prompt_mask"].sum() + batch["completion_mask"].sum()) for batch in batches)
    full = sum(batch["prompt_mask"].numel() + batch["completion_mask"].numel() for batch in batches)
    return 1 - real / full
