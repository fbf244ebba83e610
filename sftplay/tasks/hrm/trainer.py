"""transformers' Trainer over puzzles under way: a step is one segment of every row of this rank's batch.

Loop, checkpoints, optimizer and logging are the Trainer's. It overrides `training_step`, `create_optimizer`,
`create_scheduler`, `_save_checkpoint` and `_load_from_checkpoint`, and provides what `train.observer.StepTrainer`
asks for.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from sftplay import log
from sftplay.config.run import RunConfig
from sftplay.data.puzzles.sampler import TrainBatches
from sftplay.tasks.hrm.act import (
    FIGURES,
    Carry,
    Puzzles,
    all_halted,
    concatenate,
    least_segments,
    reset_halted,
    run_segment,
)
from sftplay.tasks.hrm.network import PuzzleModel
from sftplay.tasks.hrm.optimizer import AdamATan2, MovingAverage
from sftplay.tasks.hrm.progress import load_progress, save_progress
from sftplay.train.exact_batch import StepSetup
from sftplay.train.gradients import add_gradients
from sftplay.train.interval import StepCounts
from sftplay.train.observer import Observer
from sftplay.train.random_numbers import random_numbers_kept


class StepTrainerMixin:
    """Counts for a line of metrics, and a backward pass without communication; comes before transformers' Trainer.

    Tasks whose steps are their own (hrm, score) provide by it what `train.observer.StepTrainer` asks for.
    """

    accelerator: Any
    model_wrapped: Any

    def __init__(self, step: StepSetup, **named: Any) -> None:
        super().__init__(**named)
        self.heartbeat, self.micro_batcher, self.replay = step.heartbeat, step.micro_batcher, None
        self.source_names: tuple[str, ...] = ()
        self.held_out_sources: dict[str, dict[str, float]] = {}
        self.counts = StepCounts()
        self.last_loss: Any = 0.0
        self.held_out_figures: dict[str, float] = {}
        """Evaluation figures since the last line of metrics."""

    def count_step(self, rows: list[int], lengths: list[int], *, padded_tokens: int, label_tokens: int) -> None:
        """Count the rows of a step, and the tokens of its texts."""
        self.counts.rows += rows
        self.counts.lengths += lengths
        self.counts.tokens += sum(lengths)
        self.counts.padded_tokens += padded_tokens
        self.counts.label_tokens += label_tokens

    def take_counts(self) -> StepCounts:
        """Return the counts so far, and reset them."""
        taken, self.counts = self.counts, StepCounts()
        return taken

    def take_held_out_figures(self) -> dict[str, float]:
        """Return the figures of the last evaluation, for one line of metrics."""
        held_out, self.held_out_figures = self.held_out_figures, {}
        return held_out

    def rows_not_finite(self) -> list[int]:
        """Return no rows: the loss of a step is one sum, or depends on other rows."""
        return []

    def _backward(self, loss: Tensor) -> None:
        self.heartbeat.enter("backward")
        # DDP would send gradients in each backward pass; they are sent once, after the last pass.
        with self.model_wrapped.no_sync() if log.world_size() > 1 else nullcontext():
            self.accelerator.backward(loss)
        self.heartbeat.enter("forward")


class PuzzleTrainer(StepTrainerMixin, Trainer):
    """Gives each row of the batch a segment, and learns from all of them."""

    def __init__(self, step: StepSetup, *, cfg: RunConfig, model: PuzzleModel, train_rows: TrainBatches, **named: Any):
        super().__init__(step, model=model, **named)
        self.cfg, self.train_rows = cfg, train_rows
        self._last_rows: tuple[Any, Tensor] | None = None
        self.carry: Carry | None = None
        self.average = MovingAverage(model, cfg.hrm.ema) if cfg.hrm.ema else None
        self.compute: Any = torch.compile(model) if cfg.hrm.compile else None
        self._sums = torch.zeros(len(FIGURES), dtype=torch.float64)
        self._rows_touched = self._steps = 0
        self.add_callback(AfterOptimizer())

    def training_step(self, model: nn.Module, inputs: Mapping[str, Tensor], num_items_in_batch: Any = None) -> Tensor:
        """Run a segment of this rank's rows, compute the gradients of the whole batch, and return the rows' mean loss.

        The tokens of all rows are computed and counted, whether their puzzle is fresh or not.
        """
        puzzles: PuzzleModel = self.model
        puzzles.train()
        device, step = self.args.device, self.state.global_step + 1
        rows = next(self.train_rows)
        arrays = (rows.inputs, rows.labels, rows.puzzle_identifiers)
        fresh, n = Puzzles(*(torch.from_numpy(array).long().to(device) for array in arrays)), len(rows.rows)
        carry = all_halted(puzzles, n, device=device) if self.carry is None else self.carry
        self._last_rows = rows.rows, carry.halted
        cells, labelled = int(rows.inputs.size), int((rows.labels >= 0).sum())
        lengths = [rows.inputs.shape[1]] * n
        self.count_step(rows.rows.tolist(), lengths, padded_tokens=cells, label_tokens=labelled)
        carry = reset_halted(carry, fresh, model=puzzles)
        whole = n * log.world_size()
        at_least = least_segments(self.cfg.hrm, whole, seed=self.cfg.seed, step=step).to(device)
        at_least = at_least[log.rank() * n :][:n]
        loss, parts = torch.zeros((), device=device), []
        assert self.micro_batcher is not None
        for start in range(0, n, self.micro_batcher.micro_batch):
            part = slice(start, start + self.micro_batcher.micro_batch)
            segment = run_segment(puzzles, carry.rows(part), at_least=at_least[part], compute=self.compute)
            total = segment.losses.sum()
            self._backward(total / whole)
            loss += total.detach()
            parts.append(segment.carry)
            self._sums = self._sums.to(device) + segment.figures  # read by a line of metrics
        self.carry = concatenate(parts)
        self._steps += 1
        if log.world_size() > 1:
            with self.heartbeat.within("communication"):
                add_gradients(self.model_wrapped)
        self.last_loss = loss / n
        return self.last_loss

    @property
    def last_rows(self) -> list[int]:
        """Ids of the puzzles that began in this rank's last step."""
        if self._last_rows is None:
            return []
        rows, halted = self._last_rows
        return [int(row) for row, is_new in zip(rows, halted.tolist(), strict=True) if is_new]

    def averaged(self) -> AbstractContextManager[None]:
        """Within it the model has the weights that are measured and saved."""
        return self.average.in_place() if self.average is not None else nullcontext()

    def collected(self) -> AbstractContextManager[None]:
        """Within it the main rank's `state_dict` of the model has all puzzle embeddings. All ranks enter it."""
        return self.model.puzzles.collected() if self.model.puzzles is not None else nullcontext()

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Create the optimizer of everything but the puzzle embeddings. Decay reaches all of it, as published."""
        optimizer: torch.optim.Optimizer | None = getattr(self, "optimizer", None)
        if optimizer is None:
            args, weights = self.args, [p for p in self.model.parameters() if p.requires_grad]
            options: dict[str, Any] = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2)}
            options["weight_decay"] = args.weight_decay
            if self.cfg.hrm.optim == "adam_atan2":
                optimizer = AdamATan2(weights, **options)
            else:
                optimizer = torch.optim.AdamW(weights, **options, eps=args.adam_epsilon, fused=True)
            self.optimizer = optimizer
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Count the schedule's steps from 1, as published: the first one has a share of the warm-up, not 0."""
        if self.lr_scheduler is None:
            scheduler = super().create_scheduler(num_training_steps, optimizer)
            share = scheduler.lr_lambdas[0]
            scheduler.lr_lambdas = [lambda step: share(step + 1)]
            scheduler._last_lr = [rate * share(1) for rate in scheduler.base_lrs]
            for group, rate in zip(scheduler.optimizer.param_groups, scheduler._last_lr, strict=True):
                group["lr"] = rate
        return self.lr_scheduler

    def _save_checkpoint(self, *given: Any) -> None:
        with random_numbers_kept(), self.collected():
            super()._save_checkpoint(*given)
        assert self.carry is not None
        checkpoint = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        average = None if self.average is None else self.average.weights
        save_progress(checkpoint, carry=self.carry, rows=self.train_rows.state(), average=average)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        checkpoint, has_average = Path(resume_from_checkpoint), self.average is not None
        self.carry, rows, weights = load_progress(checkpoint, self.args.device, has_average=has_average)
        self.train_rows.restore(rows)
        if self.average is not None and weights is not None:
            self.average.weights = {name: weights[name] for name in self.average.weights}

    def take_figures(self, logs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the figures of all ranks since the last line, and those of the last evaluation. All ranks call it."""
        sums = self._sums.to(self.args.device)
        if log.world_size() > 1:
            torch.distributed.all_reduce(sums)
        by_name = dict(zip(FIGURES, sums.tolist(), strict=True))
        steps, count = max(1, self._steps), by_name["count"]
        rows = steps * self.cfg.train.effective_batch_size
        figures = {
            name: value / rows if name.endswith("loss") else value / max(count, 1) for name, value in by_name.items()
        }
        # All weights, and all puzzle embeddings.
        norms = [weight.detach().norm() for weight in self.model.parameters()]
        norms += [self.model.puzzles.norm()] if self.model.puzzles is not None else []
        figures |= {"count": count / steps, "rows_touched": self._rows_touched / steps}
        figures["w_norm"] = float(torch.stack(norms).norm())
        self._sums, self._steps, self._rows_touched = torch.zeros_like(self._sums), 0, 0
        return {**figures, **self.take_held_out_figures()}


class AfterOptimizer(Observer):
    """Updates the puzzle embeddings and the moving average after the optimizer's step.

    By then a step that is not finite has ended the run.
    """

    trainer: Any

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer, hrm, table = self.trainer, self.trainer.cfg.hrm, self.trainer.model.puzzles
        if table is not None:
            # The schedule is one for both; each has a peak rate of its own.
            share = trainer.lr_scheduler.lr_lambdas[0](trainer.lr_scheduler.last_epoch)
            with trainer.heartbeat.within("communication"):
                trainer._rows_touched += table.update(
                    table.take(), rate=share * hrm.puzzle_emb_lr, weight_decay=hrm.puzzle_emb_weight_decay
                )
                if (trainer.state.global_step + 1) % hrm.emb_sync_every == 0:
                    table.copy_from_main()
        if trainer.average is not None:
            trainer.average.update()
