"""Micro-batches of a rollout batch, ordered by length and without their padding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import torch

from sftplay.tasks.grpo.plan import BLOCK_COST
from sftplay.train.upstream import has_entropy_bonus

Batch = dict[str, Any]

Sharing = Literal["", "cheaper", "always"]
"""When completions are computed behind one prompt: never, where it costs less, or in every forward pass."""

PROMPT_KEYS = ("prompt_ids", "prompt_mask")
COMPLETION_KEYS = (
    "completion_ids", "completion_mask", "old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps",
    "importance_sampling_ratio", "tool_mask", "sampler_top_ids", "sampler_top_logps",
)  # fmt: skip
ROW_KEYS = ("advantages", "row")
WINDOW_KEYS = ("num_items_in_batch",)
"""The keys of a micro-batch of texts. A micro-batch with any other key (images) is left as it is."""


def loss_mask(batch: Batch) -> torch.Tensor:
    """Return which tokens of the completions count in the loss, [rows, tokens]: not those that an environment wrote."""
    mask: torch.Tensor = batch["completion_mask"]
    return mask if batch.get("tool_mask") is None else mask * batch["tool_mask"]


def depends_on_cut(trainer: Any) -> str:
    """Return why the loss of this GRPO trainer depends on which rows share a micro-batch; empty where it does not.

    The mean of equally large micro-batches is the mean over rows in loss types grpo, sapo, luspo and dr_grpo. dapo,
    cispo and vespo divide the sum over tokens by a number of the whole rollout batch. Ratios, clipping, the off-policy
    mask and KL are per token or per row. (trl 1.16, GRPOTrainer._compute_loss.)
    """
    if trainer.loss_type == "bnpo":
        return "loss_type bnpo divides by the tokens of the micro-batch"
    if trainer.top_entropy_quantile < 1.0:
        return "top_entropy_quantile compares the tokens of a micro-batch"
    if has_entropy_bonus(trainer):
        return "the entropy bonus is a mean over the tokens of the micro-batch"
    if trainer.aux_loss_enabled:
        return "the router's loss is one of the micro-batch"
    return ""


def order_by_length(batches: Sequence[Batch], *, accum: int, trims_prompts: bool, sharing: Sharing = "") -> list[Batch]:
    """Return the micro-batches of a rollout batch, reordered within each optimizer step (`accum` micro-batches).

    The longest come first, so that memory runs out in the first micro-batch or never. `trims_prompts`: whether the
    model's output is the same with less padding on the left; with learned position embeddings it is not.
    `sharing`: completions of a prompt stay together where that computes fewer tokens.
    """
    known = {*PROMPT_KEYS, *COMPLETION_KEYS, *ROW_KEYS, *WINDOW_KEYS}
    if len(batches) % accum or any(set(batch) - known for batch in batches):
        return list(batches)
    steps = [batches[first : first + accum] for first in range(0, len(batches), accum)]
    return [trim_padding(batch, trims_prompts=trims_prompts) for step in steps for batch in _order_step(step, sharing)]


def trim_padding(batch: Batch, *, trims_prompts: bool) -> Batch:
    """Remove the columns that are padding in every row: right of the completions, and left of the prompts."""
    full, width = batch["completion_mask"].size(1), max(1, int(batch["completion_mask"].sum(1).max()))
    found = {key: batch[key] for key in COMPLETION_KEYS if batch.get(key) is not None}
    # A ratio may be per row.
    trimmed = {**batch, **{key: value[:, :width] for key, value in found.items() if value.size(1) == full}}
    if trims_prompts:
        width = max(1, int(batch["prompt_mask"].sum(1).max()))
        trimmed |= {key: batch[key][:, -width:] for key in PROMPT_KEYS}
    return trimmed


def has_relative_positions(model: Any) -> bool:
    """Return whether positions are relative (rotary embeddings), so that padding on the left does not change a row."""
    return any("rotary" in type(module).__name__.lower() for module in model.modules())


def _order_step(batches: Sequence[Batch], sharing: Sharing) -> list[Batch]:
    """Return as many micro-batches with the same rows in the order with fewest tokens to compute: as now, by length,
    or by prompt."""
    whole = {
        key: value if key in WINDOW_KEYS or value is None else torch.cat([batch[key] for batch in batches])
        for key, value in batches[0].items()
    }
    rows = len(batches[0]["advantages"])
    prompts = whole["prompt_mask"].sum(1).tolist()
    completions = whole["completion_mask"].sum(1).tolist()
    numbers, groups = range(len(prompts)), list[str]()
    orders = [
        numbers,
        sorted(numbers, key=lambda n: (-completions[n], -prompts[n])),
        sorted(numbers, key=lambda n: -prompts[n] - completions[n]),
        sorted(numbers, key=lambda n: (-prompts[n], -completions[n])),
    ]
    if sharing:
        groups = [
            str(ids[len(ids) - length :]) for ids, length in zip(whole["prompt_ids"].tolist(), prompts, strict=True)
        ]
        sizes = Counter[str]()
        for n in numbers:
            sizes[groups[n]] += completions[n]
        orders.append(sorted(numbers, key=lambda n: (-sizes[groups[n]] - prompts[n], groups[n], -completions[n])))

    def count_tokens(order: Sequence[int]) -> float:
        return sum(count_part(order[at : at + rows]) for at in range(0, len(order), rows))

    def count_part(part: Sequence[int]) -> float:
        padded = len(part) * (max(prompts[n] for n in part) + max(completions[n] for n in part))
        if not sharing:
            return padded
        once = {groups[n]: prompts[n] for n in part}
        joined = BLOCK_COST * (sum(once.values()) + sum(completions[n] for n in part))
        return joined if sharing == "always" else min(padded, joined)

    best = min(orders, key=count_tokens)
    parts = torch.tensor(best, device=whole["advantages"].device).split(rows)
    return [
        {key: value if value is None or value.ndim == 0 else value[part] for key, value in whole.items()}
        for part in parts
    ]
