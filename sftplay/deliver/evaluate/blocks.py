"""The loss of a model on the held-out blocks of each source of a mixture: the same rows that training measures."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from sftplay import log
from sftplay.atomic import write_text
from sftplay.data.records import IGNORE_INDEX
from sftplay.deliver.evaluate.evaluate import ready_to_answer


def measure_blocks(model: Any, held_out: Mapping[str, Iterable[dict[str, Any]]], *, path: Path) -> dict[str, Any]:
    """Write `path` (.json): `loss`, the mean over all label tokens, and `sources`: loss and label tokens of each."""
    with ready_to_answer(model):
        sums = {name: summed_loss(model, rows) for name, rows in held_out.items()}
    whole = sum(loss for loss, _ in sums.values()), sum(count for _, count in sums.values())
    sources = {name: _figures(*found) for name, found in sums.items()}
    figures = {"n": 0, **_figures(*whole), "sources": sources}
    write_text(path, json.dumps(figures, indent=1) + "\n")
    told = "  ".join(f"{name} {each['loss']:.4f}" for name, each in sources.items())
    log.say(f"{path.stem}: loss {figures['loss']:.4f}  {told}", "eval")
    return figures


@torch.no_grad()
def summed_loss(model: Any, rows: Iterable[dict[str, Any]]) -> tuple[float, int]:
    """The sum of the label tokens' losses of blocks, and their number."""
    device, total, count = next(model.parameters()).device, 0.0, 0
    for row in rows:
        ids, positions, labels = (
            torch.as_tensor(row[key], device=device)[None] for key in ("input_ids", "position_ids", "labels")
        )
        scores = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0, :-1].float()
        total += float(functional.cross_entropy(scores, labels[0, 1:], reduction="sum", ignore_index=IGNORE_INDEX))
        count += int((labels[0, 1:] != IGNORE_INDEX).sum())
    return total, count


def _figures(loss_sum: float, count: int) -> dict[str, Any]:
    loss = loss_sum / count if count else math.nan
    return {"loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf, "label_tokens": count}
