"""The scores of both answers of a pair, the loss of Bradley and Terry, and what the scores say of held-out pairs."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from sftplay.config.run import RunConfig
from sftplay.tasks.preference.shared_prompt import join_sides, keeps_sides_apart, split_sides
from sftplay.tasks.reward_model.score_head import ScoreHead, find_score_head
from sftplay.train.micro_batches import Batch, can_compute
from sftplay.train.shared_prompt import attends_to_all, unwrap
from sftplay.train.upstream import find_attention


def pair_scores(model: Any, batch: Batch, *, shares: bool) -> Tensor:
    """Compute the scores of a batch of `PairCollator`, fp32 [pairs, 2], chosen answers first.

    With `shares` the prompt of a pair is computed once, which `prove` allows; else each answer has a row, and `model`
    may be wrapped by DDP, FSDP or DeepSpeed. The score of an answer is that of its last token that is no padding, as
    plain transformers reads it.
    """
    base = unwrap(model)
    pad = base.config.get_text_config().pad_token_id
    if not shares:
        inputs = split_sides(batch, [True, True]).inputs
        ids = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, pad)
        return model(**{**inputs, "input_ids": ids}, use_cache=False).logits.float().view(2, -1).t()
    places = torch.arange(batch["input_ids"].shape[1], device=batch["input_ids"].device)
    counts = (batch["input_ids"] != pad) & (batch["attention_mask"] == 1)
    is_chosen = places < (batch["prompt_tokens"] + batch["chosen_tokens"])[:, None]
    ends = torch.stack([(places * (counts & side)).argmax(1) for side in (is_chosen, ~is_chosen)], dim=1)
    with _scored_at(find_score_head(base), ends) as head:
        model(**join_sides(batch, find_attention(base)).inputs, use_cache=False)
        return head.take()


@contextmanager
def _scored_at(head: ScoreHead, ends: Tensor) -> Iterator[ScoreHead]:
    """Inside, the head scores the places `ends` only, int64 [rows, 2]."""
    head.places = ends
    try:
        yield head
    finally:
        head.places = None


def pair_losses(scores: Tensor, margin: Tensor | None, *, center: float) -> Tensor:
    """Return -log sigmoid(chosen - rejected - margin) + center * (chosen + rejected)^2 for each pair of `scores`
    [pairs, 2].

    Ouyang et al. 2022 (arXiv:2203.02155), equation 1; the margin is that of Touvron et al. 2023 (arXiv:2307.09288),
    equation 2, the last part that of Eisenstein et al. 2023 (arXiv:2312.09244), as in trl 1.16, reward_trainer.py.
    """
    ahead = scores[:, 0] - scores[:, 1]
    losses = -logsigmoid(ahead if margin is None else ahead - margin)
    return losses + center * scores.sum(1).square() if center else losses


def prove(model: Any) -> bool:
    """Return whether pairs of a few tokens have the same scores with a shared prompt as apart, and neither side has a
    gradient from the other. False where this process does not hold the weights.
    """
    base = unwrap(model)
    if not attends_to_all(base) or not can_compute(base):
        return False
    return keeps_sides_apart(base, lambda batch, shares: pair_scores(base, batch, shares=shares), near_zero=1.0)


BINS = 10


def describe_scores(scores: Tensor, margin: Tensor | None, *, cfg: RunConfig, rows: Sequence[int]) -> dict[str, Any]:
    """Compute the figures of held-out pairs from their scores [pairs, 2]; `rows` are their numbers in the file.

    `accuracy` is the share of pairs whose chosen answer has the higher score; ties count half. `stderr` is its standard
    error, `margin` the mean of the difference.
    """
    scores = scores.double()
    ahead = scores[:, 0] - scores[:, 1]
    right = (ahead > 0).double() + 0.5 * (ahead == 0).double()
    accuracy, n = float(right.mean()), len(scores)
    losses = pair_losses(scores, margin, center=cfg.reward_model.center)
    return {
        "n": n,
        "loss": float(losses.mean()),
        "accuracy": accuracy,
        "stderr": math.sqrt(accuracy * (1 - accuracy) / n),
        "margin": float(ahead.mean()),
        "rewards/chosen": float(scores[:, 0].mean()),
        "rewards/rejected": float(scores[:, 1].mean()),
        **describe_calibration(ahead, rows=rows, seed=cfg.seed),
    }


def describe_calibration(ahead: Tensor, *, rows: Sequence[int], seed: int) -> dict[str, Any]:
    """Compare the probability that one answer is better, sigmoid of the difference of scores, with how often it is.

    The chosen answer is always the better one, so a hash decides which answer of a pair the probability is about.
    `calibration` holds bins of equal width, those without a pair left out; `calibration_error` is the mean over pairs
    of the distance between both in their bin (expected calibration error, Guo et al. 2017, arXiv:1706.04599).
    """
    first = torch.tensor([_is_first(row, seed) for row in rows])
    chances = torch.where(first, ahead, -ahead).sigmoid()
    numbers = (chances * BINS).long().clamp(max=BINS - 1)
    bins = []
    for number in range(BINS):
        inside = numbers == number
        if count := int(inside.sum()):
            predicted, observed = float(chances[inside].mean()), float(first[inside].double().mean())
            bins.append({"from": number / BINS, "n": count, "predicted": predicted, "observed": observed})
    error = sum(found["n"] * abs(found["predicted"] - found["observed"]) for found in bins) / max(1, len(ahead))
    return {"calibration": bins, "calibration_error": error}


def _is_first(row: int, seed: int) -> bool:
    return bool(hashlib.sha256(f"{seed} {row}".encode()).digest()[0] & 1)
