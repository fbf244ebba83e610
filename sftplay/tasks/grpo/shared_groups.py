"""Log-probabilities of the completions of a rollout batch, with each prompt computed once for all its completions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sftplay import log
from sftplay.config.run import RunConfig
from sftplay.data.records import IGNORE_INDEX
from sftplay.errors import ConfigError, ran_out_of_memory
from sftplay.tasks.grpo.length_order import has_relative_positions
from sftplay.train.loss_heads import PROOF_TOLERANCE
from sftplay.train.micro_batches import can_compute, watched_embeddings
from sftplay.train.preflight import has_sharded_weights
from sftplay.train.shared_prompt import (
    EXACT_TOLERANCE,
    PromptLayout,
    attends_to_all,
    layout_inputs,
    teach_attention,
    unwrap,
)
from sftplay.train.upstream import find_attention, fitted_tiles

Logps = tuple[Tensor, Tensor | None, Tensor | None]
"""As TRL returns them: log-probabilities and entropies, [rows, completion tokens], and the router's loss."""


class JoinedRows(NamedTuple):
    """A row of prompts and their completions, the label of each token, and the cell of each label in [rows, tokens]."""

    layout: PromptLayout
    ids: Tensor
    labels: Tensor
    cells: Tensor


def join_rows(input_ids: Tensor, attention_mask: Tensor, completion_tokens: int) -> JoinedRows:
    """Join rows of prompts, padded on the left, and completions, padded on the right. Equal prompts become one.

    A prompt's last token and all but the last one of a completion stand before the completion's labels.
    """
    width, device = input_ids.size(1) - completion_tokens, input_ids.device
    starts = (width - attention_mask[:, :width].sum(1)).tolist()
    lengths = attention_mask[:, width:].sum(1).tolist()
    groups = dict[tuple[int, ...], list[tuple[int, list[int]]]]()
    for number, (row, start, length) in enumerate(zip(input_ids.tolist(), starts, lengths, strict=True)):
        groups.setdefault(tuple(row[start:width]), []).append((number, row[width : width + length]))
    # A completion without tokens counts for nothing; without any, one stays, since DDP and FSDP wait for every weight.
    kept = {
        prompt: filled for prompt, rows in groups.items() if (filled := [each for each in rows if each[1]])
    } or {prompt: rows[:1] for prompt, rows in list(groups.items())[:1]}  # fmt: skip
    ids, labels, cells = list[int](), list[int](), list[int]()
    for prompt, rows in kept.items():
        ids += prompt[:-1]
        labels += [IGNORE_INDEX] * (len(prompt) - 1)
        for number, completion in rows:
            ids += [prompt[-1], *completion[:-1]]
            labels += completion or [IGNORE_INDEX]
            cells += range(number * completion_tokens, number * completion_tokens + len(completion))
    layout = PromptLayout(
        [len(prompt) - 1 for prompt in kept], [[max(1, len(found)) for _, found in rows] for rows in kept.values()],
        device,
    )  # fmt: skip
    return JoinedRows(layout, *(torch.tensor(part, device=device, dtype=torch.long) for part in (ids, labels, cells)))


def score_groups(
    model: Any, input_ids: Tensor, attention_mask: Tensor, completion_tokens: int, *, batch_size: int | None,
    compute_entropy: bool, autocast: Callable[[], Any],
) -> Logps:  # fmt: skip
    """Compute what TRL's `_get_per_token_logps_and_entropies` does for rows of text, through the head that TRL gave the
    model. `model` may be wrapped by DDP, FSDP or DeepSpeed."""
    logps, entropies = list[Tensor](), list[Tensor]()
    size = batch_size or len(input_ids)
    for ids, mask in zip(input_ids.split(size), attention_mask.split(size), strict=True):
        joined = join_rows(ids, mask, completion_tokens)
        with autocast():
            inputs = layout_inputs(joined.layout, joined.ids)
            outputs = model(**inputs, shift_labels=joined.labels[None], fused_lm_head=True)
        is_label, number = joined.labels != IGNORE_INDEX, len(ids) * completion_tokens

        def spread(found: Tensor, is_label: Tensor = is_label, cells: Tensor = joined.cells, n: int = number) -> Tensor:
            return found.new_zeros(n).index_copy(0, cells, found[0][is_label]).view(-1, completion_tokens)

        logps.append(spread(outputs.log_probs))
        if compute_entropy:
            entropies.append(spread(outputs.entropy))
    return torch.cat(logps), torch.cat(entropies) if compute_entropy else None, None
