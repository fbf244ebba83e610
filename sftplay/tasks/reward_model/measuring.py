"""Figures of held-out pairs: how many are in the right order, by how much, and how sure the model may be."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sftplay import log
from sftplay.config.run import RunConfig
from sftplay.evaluate.evaluate import evenly_spaced, ready_to_answer
from sftplay.tasks.preference.measuring import EvaluateHeldOut
from sftplay.tasks.preference.reference import compute_rows, pass_settings
from sftplay.tasks.reward_model.scores import describe_scores, pair_scores
from sftplay.train.metrics import write_measured


def measure(model: Any, pairs: Any, *, cfg: RunConfig, path: Path) -> dict[str, Any]:
    """Measure `model` on all held-out pairs; write `path` (.json), and `eval.limit` of them with scores (.jsonl)."""
    rows, pad = pairs.held_out, model.config.get_text_config().pad_token_id
    log.say(f"measuring the model ({path.stem}) on {len(rows):,} held-out pairs", "eval")
    with ready_to_answer(model, cfg):
        scores = compute_scores(model, rows, shares=False, pad_token_id=pad, batch_size=cfg.eval.batch_size)
    figures = compute_figures(scores, rows, cfg=cfg)
    write_measured(path, figures, lines=describe_pairs(scores, pairs, limit=cfg.eval.limit))
    log.say(f"{path.stem}: {format_summary(figures)}", "eval")
    return figures


def compute_scores(model: Any, rows: Any, *, shares: bool, **settings: Any) -> Tensor:
    """Compute the scores of all `rows`, fp32 [rows, 2]; `settings` are those of `compute_rows`."""
    (scores,) = compute_rows(lambda batch: [pair_scores(model, batch, shares=shares).float()], model, rows, **settings)
    return scores


def compute_figures(scores: Tensor, rows: Any, *, cfg: RunConfig) -> dict[str, Any]:
    """Compute the figures of pairs from their scores, with the margins of the rows where the loss has them."""
    margin = torch.tensor(rows["margin"][:], dtype=torch.float64) if cfg.reward_model.margin else None
    return describe_scores(scores, margin, cfg=cfg, rows=rows["row"][:])


def describe_pairs(scores: Tensor, pairs: Any, *, limit: int | None) -> list[dict[str, Any]]:
    """Describe at most `limit` pairs for people, evenly spaced over all."""
    texts, lines = pairs.records("held_out"), list[dict[str, Any]]()
    for number in evenly_spaced(range(len(scores)), limit):
        read, (chosen, rejected) = texts[number], scores[number].tolist()
        line = {
            "row": pairs.held_out[number]["row"],
            "prompt": read.beginning or read.prompt[-1].content,
            "chosen": read.chosen,
            "rejected": read.rejected,
            "scores": [chosen, rejected],
            "margin": chosen - rejected,
            "correct": chosen > rejected,
        }
        lines.append(line)
    return lines


def format_summary(figures: Mapping[str, Any]) -> str:
    """Format the figures that say most, for a line."""
    right = f"{figures['accuracy']:.1%} +- {figures['stderr']:.1%} right"
    sure = f"calibration error {figures['calibration_error']:.3f}"
    return f"loss {figures['loss']:.4f}  {right}  margin {figures['margin']:.4f}  {sure}  (n {figures['n']})"


class EvaluateScores(EvaluateHeldOut):
    """Measures held-out pairs by their scores."""

    def compute(self) -> tuple[dict[str, Any], Tensor]:
        scores = compute_scores(rows=self.pairs.held_out, **pass_settings(self.trainer))
        return compute_figures(scores, self.pairs.held_out, cfg=self.cfg), scores

    def describe(self, computed: Tensor) -> list[dict[str, Any]]:
        return describe_pairs(computed, self.pairs, limit=self.cfg.eval.limit)

    def summarize(self, figures: Mapping[str, Any]) -> str:
        return format_summary(figures)
