"""The reward model: a score for answers, learned from pairs in which one answer was chosen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from sftplay import log
from sftplay.config.run import RunConfig
from sftplay.reward.model_reward import find_score_model, open_score_model
from sftplay.tasks.preference.task import build_pair_trainer, load_rows, report_rows
from sftplay.tasks.preference.trainer import Figure, Figures, PairMixin
from sftplay.tasks.reward_model.scores import EvaluateScores, pair_losses, pair_scores, prove, to_score_model
from sftplay.tasks.reward_model.scores import measure as measure_pairs
from sftplay.train.exact_batch import ExactBatchMixin, StepSetup
from sftplay.train.micro_batches import Batch
from sftplay.train.task import Rows, TrainerParts

__all__ = ["build_trainer", "load_result", "load_rows", "measure", "report_rows", "reshape_model"]


class RewardModelTrainer(PairMixin, ExactBatchMixin, Trainer):
    """Learns scores from pairs; figures have the names that they have in tasks of preferences."""

    def __init__(self, step: StepSetup, *, cfg: RunConfig, **named: Any) -> None:
        super().__init__(replace(step, loss_head=""), **named)  # there is no head over the vocabulary
        self.model_accepts_loss_kwargs = True  # the loss is divided by the pairs of the whole batch already
        self.cfg = cfg
        with self.compute_loss_context_manager():
            self.shares_prompt = self.micro_batcher is not None and prove(self.model)
        if not self.shares_prompt:
            log.say("note: each answer is a row with a prompt of its own: that both may share one is not proved here")

    def compute_rows(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Figures]:
        scores = pair_scores(model, batch, shares=self.shares_prompt)
        settings = self.cfg.reward_model
        losses = pair_losses(scores, batch["margin"] if settings.margin else None, center=settings.center)
        with torch.no_grad():
            ahead = scores[:, 0] - scores[:, 1]
            figures = {
                "rewards/chosen": Figure(scores[:, 0]),
                "rewards/rejected": Figure(scores[:, 1]),
                "rewards/margins": Figure(ahead),
                "rewards/accuracies": Figure((ahead.sign() + 1) / 2),
            }
        return losses, figures


def reshape_model(model: Any, tokenizer: Any, *, cfg: RunConfig) -> Any:
    """Return a model with a new head of one score on the weights of the causal `model`.

    Raises:
        ConfigError: transformers has no class for it.
    """
    return to_score_model(model, pad_token_id=tokenizer.pad_token_id, seed=cfg.seed)


def load_result(cfg: RunConfig, path: Path) -> Any:
    """Open the result in a run's folder."""
    model, _ = open_score_model(find_score_model(str(path), cfg.output_dir))
    return model


def measure(model: Any, rows: Rows, *, cfg: RunConfig, path: Path) -> None:
    """Measure how many held-out pairs are in the right order, and how sure the model may be."""
    measure_pairs(model, rows.source, cfg=cfg, path=path)


def build_trainer(parts: TrainerParts) -> RewardModelTrainer:
    callbacks = []
    if parts.held_out is not None:
        callbacks.append(EvaluateScores(parts.cfg, parts.rows.source, folder=parts.folder.eval))
    return build_pair_trainer(RewardModelTrainer, parts, callbacks)
