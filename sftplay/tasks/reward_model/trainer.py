"""transformers' Trainer over pairs: the answer that was chosen shall have the higher score."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from sftplay import log
from sftplay.config.run import RunConfig
from sftplay.tasks.preference.trainer import Figure, Figures, PairMixin
from sftplay.tasks.reward_model.scores import pair_losses, pair_scores, prove
from sftplay.train.exact_batch import ExactBatchMixin, StepSetup
from sftplay.train.micro_batches import Batch


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
