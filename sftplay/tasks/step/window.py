"""The one mixin over TRL's trainers: one Trainer batch is a rank's whole window of an optimizer step.

The Trainer is told `per_device = effective / processes` and accumulation 1; `training_step` cuts the window into
micro-batches, and once memory does not suffice runs the same rows again in smaller ones. It overrides `training_step`,
`compute_loss` and, on a CPU, `_clip_grad_norm`, and copies nothing of TRL's. Used for SFT and CPT on one process or
DDP; with FSDP and DeepSpeed, which meet within every micro-batch, the Trainer accumulates and hands over a piece of the
window at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from sftplay.heartbeat import Heartbeat
from sftplay.monitor.gradient_norm import gradient_norm
from sftplay.monitor.out_of_memory import AdaptiveBatches, RandomState, Shortage, held_bytes, ran_out_of_memory
from sftplay.tasks.step.gradient_average import average_gradients
from sftplay.tasks.step.label_head import IGNORED, find_label_head
from sftplay.tasks.step.micro_batches import MicroBatcher
from sftplay.tasks.step.replay import Replay

Batch = dict[str, Tensor]

PIECE = ("input_ids", "attention_mask", "labels")
"""What the model is given of a window; the rest is for the kit."""


@dataclass
class StepCounts:
    """What this rank has trained on since the last line of metrics."""

    tokens: int = 0
    padded_tokens: int = 0
    label_tokens: int = 0
    loss_sum: Any = None
    """Sum of the label tokens' losses: a tensor, which only a line of metrics waits for. None without a step."""

    rows: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    """Real tokens of each of `rows`."""


class Window:
    """Mixed in before a TRL trainer: `class Run(Window, SFTTrainer)`. `prepare` must be called before training."""

    def prepare(
        self, micro_batcher: MicroBatcher | None, *, held_out_labels_per_row: float = 0.0, replay: Replay | None = None
    ) -> None:
        """Say how windows are cut (None: the Trainer accumulates), and what becomes of one for which memory does not
        suffice (None: the run ends).

        `held_out_labels_per_row` is the mean count of label tokens in the held-out rows; with it the Trainer's mean
        over rows becomes the exact mean over label tokens.
        """
        self.micro_batcher, self.replay = micro_batcher, replay
        self.heartbeat = Heartbeat()
        self.counts = StepCounts()
        self.last_loss: Any = 0.0
        self.last_windows: list[Batch] = []
        """What this rank's last step was made of."""

        self._parts_of_step = -1
        self.look_at_loss: Callable[[Tensor], None] | None = None
        """Told each loss before its backward pass, where that is the last moment to stop."""

        self.held_out_labels_per_row = held_out_labels_per_row
        if replay:
            replay.attend(self)
        args, model = self.args, self.model  # type: ignore[attr-defined]
        self.measured = AdaptiveBatches(args.per_device_eval_batch_size, "the evaluation")
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        plain_head = args.loss_type == "nll" and not args.use_liger_kernel and not args.label_smoothing_factor
        self.label_head = find_label_head(base) if plain_head else None

    def training_step(self, model: nn.Module, window: Batch, num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward over all pieces of the window; the sum of their losses.

        A piece that sends gradients to other ranks while it computes is not run again: a rank that fails inside it
        would leave the others waiting. With a replay that sends them afterwards there is none.

        Raises:
            OutOfMemory: memory does not suffice for a single row of the window.
        """
        self._count(window)
        if self.micro_batcher is None:
            return self._run_part(model, window, num_items_in_batch)
        self.last_windows = [window]
        replay, padded_tokens = self.replay, self.counts.padded_tokens
        start = RandomState() if replay else None
        while True:
            pieces = list(self.micro_batcher.cut(window))
            sends = self._sends_in_backward()
            alone = pieces[:-1] if sends else pieces
            total, shortage = self._attempt(model, alone, num_items_in_batch)
            if not replay or not start or not (shortages := replay.all_shortages(shortage)):
                break
            model.zero_grad(set_to_none=True)
            start.restore()
            self.counts.padded_tokens = padded_tokens
            self.micro_batcher = replay.step_down(self.micro_batcher, len(window["row"]), shortages)
        if sends:
            total = total + self._run_piece(model, pieces[-1], num_items_in_batch)
        elif replay and replay.sends_afterwards:
            with self.heartbeat.within("communication"):
                average_gradients(model)
        self.last_loss = total.detach()
        self._count_loss(self.last_loss, num_items_in_batch)
        return total

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        """Clip the gradients by their exact norm where torch's is not; the norm before."""
        args = self.args  # type: ignore[attr-defined]
        if self.micro_batcher is None or args.device.type != "cpu":
            return super()._clip_grad_norm(model)  # type: ignore[misc]
        norm = gradient_norm(model.parameters())
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), args.max_grad_norm, norm)
        return norm

    def take_counts(self) -> StepCounts:
        """The counts so far; counting starts again from zero."""
        taken, self.counts = self.counts, StepCounts()
        return taken

    @property
    def last_rows(self) -> list[int]:
        """Ids of the rows of this rank's last step."""
        return [row for window in self.last_windows for row in window["row"].tolist()]

    @torch.no_grad()
    def rows_not_finite(self) -> list[int]:
        """Ids of those whose loss, computed alone and without dropout, is not finite. Asks no other rank."""
        model = self.model  # type: ignore[attr-defined]
        found = []
        model.eval()
        # Where weights are split, a rank cannot compute alone.
        for window in self.last_windows if self.micro_batcher is not None else ():
            for n, width in enumerate(window["attention_mask"].sum(1).tolist()):
                row = {key: window[key][n : n + 1, :width] for key in PIECE}
                with self.compute_loss_context_manager():  # type: ignore[attr-defined]
                    loss = self._loss_of_piece(model, row, False, 1)
                if not torch.isfinite(loss):
                    found.append(int(window["row"][n]))
        model.train()
        return found

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Batch,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The sum of the label tokens' losses over `num_items_in_batch`.

        Skips SFTTrainer's own version, which computes entropy and accuracy over all scores and gathers them across
        processes three times a piece.
        """
        inputs = {key: value for key, value in inputs.items() if key not in ("row", "_prediction_loss_only")}
        if model.training:
            return self._loss_of_piece(model, inputs, return_outputs, num_items_in_batch)
        return self._held_out_loss(model, inputs, return_outputs, num_items_in_batch)

    def _sends_in_backward(self) -> bool:
        several = self.accelerator.num_processes > 1  # type: ignore[attr-defined]
        return several and not (self.replay and self.replay.sends_afterwards)

    def _attempt(self, model: nn.Module, pieces: Iterable[Batch], n_items: Any) -> tuple[Any, Shortage | None]:
        """The sum of the pieces' losses, or where memory did not suffice. None of them sends gradients anywhere.

        The error and what it holds on to, the graph among it, are gone when this returns.
        """
        total: Any = 0.0
        for piece in pieces:
            try:
                with self.accelerator.no_sync(model):  # type: ignore[attr-defined]
                    total = total + self._run_piece(model, piece, n_items)
            except RuntimeError as error:
                if not self.replay or not ran_out_of_memory(error):
                    raise
                rows, tokens = len(piece["input_ids"]), piece["input_ids"].numel()
                reason = (str(error).splitlines() or [""])[0]
                return total, Shortage(rows, tokens, self.heartbeat.phase, held_bytes(), reason)
        return total, None

    def _run_part(self, model: nn.Module, part: Batch, n_items: Any) -> Tensor:
        """One of the micro-batches that the Trainer accumulates; ranks meet in it, so it cannot be run again."""
        step = self.state.global_step  # type: ignore[attr-defined]
        if step != self._parts_of_step:
            self._parts_of_step, self.last_windows, self.last_loss = step, [], 0.0
        self.last_windows.append(part)
        loss = self._run_piece(model, {key: part[key] for key in PIECE}, n_items)
        self.last_loss = self.last_loss + loss.detach()
        self._count_loss(loss.detach(), n_items)
        return loss

    def _run_piece(self, model: nn.Module, piece: Batch, n_items: Any) -> Tensor:
        self.counts.padded_tokens += piece["input_ids"].numel()
        self.heartbeat.enter("forward")
        return super().training_step(model, piece, n_items)  # type: ignore[misc]

    def _loss_of_piece(self, model: nn.Module, inputs: Batch, return_outputs: bool, n_items: Any) -> Any:
        # With a cache the attention of packed rows would leak from one into the next.
        inputs = {**inputs, "use_cache": False}
        if self.label_head is not None:
            inputs["shift_labels"] = self.label_head.narrow(inputs["labels"])
        try:
            loss = Trainer.compute_loss(self, model, inputs, return_outputs, n_items)
        finally:
            if self.label_head is not None:
                self.label_head.widen()
        if model.training:
            if self.look_at_loss is not None:
                self.look_at_loss(loss.detach())
            self.heartbeat.enter("backward")
        return loss

    def _held_out_loss(self, model: nn.Module, inputs: Batch, return_outputs: bool, n_items: Any) -> Any:
        """As `compute_loss`; where memory does not suffice, in ever smaller portions. Ranks do not meet in it."""
        rows = len(inputs["input_ids"])
        if self.held_out_labels_per_row:
            # The Trainer multiplies by the processes for DDP's mean over gradients; there is none here.
            count = rows * self.held_out_labels_per_row * self.accelerator.num_processes  # type: ignore[attr-defined]
            n_items = torch.tensor(count, device=inputs["input_ids"].device)

        def measure(portion: slice) -> Any:
            self.heartbeat.enter("evaluation")  # a beat for each portion: only a single one can last too long
            return self._loss_of_piece(model, {k: v[portion] for k, v in inputs.items()}, return_outputs, n_items)

        if (
            n_items is None or self.micro_batcher is None
        ):  # a mean over rows is no sum of portions; split weights want company
            return measure(slice(rows))
        parts = list(self.measured.each(rows, measure))
        if return_outputs:
            return sum(loss for loss, _ in parts), parts[-1][1]
        return sum(parts)

    def _count(self, window: Batch) -> None:
        lengths = window["attention_mask"].sum(1).tolist()
        self.counts.tokens += sum(lengths)
        self.counts.lengths += lengths
        self.counts.label_tokens += int((window["labels"][:, 1:] != IGNORED).sum())
        self.counts.rows += window["row"].tolist()

    def _count_loss(self, loss: Tensor, label_tokens: Any) -> None:
        """Add the sum of losses, which the Trainer has divided by all ranks' `label_tokens`, and multiplied
        by the processes for DDP's mean over gradients."""
        if label_tokens is None:
            return
        args, processes = self.args, self.accelerator.num_processes  # type: ignore[attr-defined]
        loss_sum = loss.double() * label_tokens / (processes if args.average_tokens_across_devices else 1)
        before = self.counts.loss_sum
        self.counts.loss_sum = loss_sum if before is None else before + loss_sum
