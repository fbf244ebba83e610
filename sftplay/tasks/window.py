"""The one mixin over TRL's trainers: one Trainer batch is a rank's whole window of an optimizer step.

The Trainer is told `per_device = effective / processes` and accumulation 1; `training_step` cuts the window into
micro-batches. It overrides `training_step` and `compute_loss` only and copies nothing of TRL's. Used for SFT and CPT on
one process or DDP; GRPO, FSDP and DeepSpeed keep stock accumulation.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from sftplay.tasks.label_head import IGNORED, find_label_head
from sftplay.tasks.pieces import Cutter


@dataclass
class StepCounts:
    """What this rank has trained on since the last line of metrics."""

    tokens: int = 0
    padded_tokens: int = 0
    label_tokens: int = 0
    rows: list[int] = field(default_factory=list)


class Window:
    """Mixed in before a TRL trainer: `class Run(Window, SFTTrainer)`. `prepare` must be called before training."""

    def prepare(self, cutter: Cutter, *, held_out_labels_per_row: float = 0.0) -> None:
        """Say how windows are cut. `held_out_labels_per_row` is the mean count of label tokens in the held-out rows;
        with it the Trainer's mean over rows becomes the exact mean over label tokens."""
        self.cutter = cutter
        self.counts = StepCounts()
        self.last_loss: Any = 0.0
        self.held_out_labels_per_row = held_out_labels_per_row
        args, model = self.args, self.model  # type: ignore[attr-defined]
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        plain_head = args.loss_type == "nll" and not args.use_liger_kernel and not args.label_smoothing_factor
        self.label_head = find_label_head(base) if plain_head else None

    def training_step(self, model: nn.Module, window: dict[str, Tensor], num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward over all pieces of the window; the sum of their losses."""
        self._count(window)
        pieces = list(self.cutter.cut(window))
        total: Any = 0.0
        for i, piece in enumerate(pieces):
            self.counts.padded_tokens += piece["input_ids"].numel()
            # Gradients travel between processes once a step, with the last piece.
            last = i == len(pieces) - 1
            sync = contextlib.nullcontext() if last else self.accelerator.no_sync(model)  # type: ignore[attr-defined]
            with sync:
                total = total + super().training_step(model, piece, num_items_in_batch)  # type: ignore[misc]
        self.last_loss = total.detach()
        return total

    def take_counts(self) -> StepCounts:
        """The counts so far; counting starts again from zero."""
        taken, self.counts = self.counts, StepCounts()
        return taken

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The sum of the label tokens' losses over `num_items_in_batch`.

        Skips SFTTrainer's own version, which computes entropy and accuracy over all scores and gathers them across
        processes three times a piece.
        """
        inputs = {key: value for key, value in inputs.items() if key not in ("row", "_prediction_loss_only")}
        if not model.training and self.held_out_labels_per_row:
            # The Trainer multiplies by the processes for DDP's mean over gradients; there is none here.
            ids, processes = inputs["input_ids"], self.accelerator.num_processes  # type: ignore[attr-defined]
            num_items_in_batch = torch.tensor(len(ids) * self.held_out_labels_per_row * processes, device=ids.device)
        # With a cache the attention of packed rows would leak from one into the next.
        inputs["use_cache"] = False
        if self.label_head is None:
            return Trainer.compute_loss(self, model, inputs, return_outputs, num_items_in_batch)
        inputs["shift_labels"] = self.label_head.narrow(inputs["labels"])
        try:
            return Trainer.compute_loss(self, model, inputs, return_outputs, num_items_in_batch)
        finally:
            self.label_head.widen()

    def _count(self, window: dict[str, Tensor]) -> None:
        self.counts.tokens += int(window["attention_mask"].sum())
        self.counts.label_tokens += int((window["labels"][:, 1:] != IGNORED).sum())
        self.counts.rows += window["row"].tolist()
