"""transformers' Trainer over pairs: a step's loss is the mean over the pairs of its whole effective batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Trainer

from sftplay import log
from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError
from sftplay.model.out_of_memory import AdaptiveBatches, Shortage
from sftplay.tasks.preference.losses import compute_rewards, kto_losses, pair_losses, reference_point
from sftplay.tasks.preference.shared_prompt import completion_logps, prove, put_chunked_logps
from sftplay.tasks.preference.spec import uses_reference
from sftplay.train.eval_mode import eval_mode
from sftplay.train.exact_batch import ADVICE, ExactBatchMixin, StepSetup
from sftplay.train.micro_batches import Batch, MicroBatcher, SourceLoss
from sftplay.train.shared_prompt import unwrap

if TYPE_CHECKING:
    Base = ExactBatchMixin  # the mixin that comes after this one
else:
    Base = object


class PairBatcher(MicroBatcher):
    """Cuts windows of pairs, and keeps all their columns."""

    def _take(self, window: Batch, rows: Tensor, width: int) -> Batch:
        return {key: value[rows, :width] if value.dim() > 1 else value[rows] for key, value in window.items()}


class Figure(NamedTuple):
    """A figure of each row, [rows], and which rows have it; None means all."""

    values: Tensor
    where: Tensor | None = None


Figures = dict[str, Figure]


class PairMixin(Base):
    """Counts rows instead of label tokens: `class Trainer(PairMixin, ExactBatchMixin, transformers.Trainer)`.

    The class that it is in computes the losses of rows (`compute_rows`). The loss of a step is their sum over the rows
    of the effective batch, on any number of processes and in any micro-batches.
    """

    loss_is_scaled_for_ga = True

    def __init__(self, step: StepSetup, **named: Any) -> None:
        batcher = step.micro_batcher
        if batcher is not None:
            batcher = PairBatcher(batcher.micro_batch, False, batcher.max_tokens, batcher.budget_tokens)
        super().__init__(replace(step, micro_batcher=batcher), **named)
        self._pending: list[dict[str, Tensor]] = []  # figures of this step's micro-batches
        self._sums: dict[str, Tensor] = {}  # figure -> its sum and number of rows since the last line, fp64 [2]
        if off := turn_dropout_off(self.model):
            log.say(f"note: dropout is off in {off} layers: answers are compared, which it would blur")

    def compute_rows(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Figures]:
        """Return the loss of each row, [rows], and figures for metrics."""
        raise NotImplementedError

    def training_step(self, model: nn.Module, inputs: Batch, num_items_in_batch: Any = None) -> Tensor:
        """Run forward and backward over all micro-batches of the window; return the sum of their losses."""
        self._pending = []
        loss = super().training_step(model, inputs, num_items_in_batch)
        for figures in self._pending:
            self._sums = {name: sums + self._sums.get(name, 0) for name, sums in figures.items()}
        return loss

    def take_figures(self, logs: Mapping[str, Any]) -> dict[str, Any]:
        """Return means over the rows of all ranks since the last line. All ranks call it."""
        return {**self._take_means(), **self.take_held_out_figures()}

    @torch.no_grad()
    def rows_not_finite(self) -> list[int]:
        """Return ids of the last step's rows whose loss alone is not finite. Asks no other rank."""
        row_ids = []
        # Where weights are sharded, a rank cannot compute alone.
        for window in self.last_windows if self.micro_batcher is not None else ():
            for row in PairBatcher(1).cut(window):
                row = {key: value.to(self.args.device) for key, value in row.items()}
                with self.compute_loss_context_manager(), eval_mode(self.model):
                    losses, _ = self.compute_rows(self.model, row)
                row_ids += row["row"][~losses.isfinite()].tolist()
        return row_ids

    def _take_means(self) -> dict[str, float | None]:
        names, sums = list(self._sums), list(self._sums.values())
        self._sums = {}
        if not sums:
            return {}
        table = torch.stack(sums)
        if log.world_size() > 1:
            with self.heartbeat.within("communication"):
                torch.distributed.all_reduce(table)
        return {
            name: total / count if count else None for name, (total, count) in zip(names, table.tolist(), strict=True)
        }

    def _get_num_items_in_batch(self, *_: Any) -> int:
        args = self.args
        return args.per_device_train_batch_size * args.gradient_accumulation_steps * self.accelerator.num_processes

    def _attempt(
        self, model: nn.Module, micro_batches: Iterable[Batch], *, n_items: Any
    ) -> tuple[list[SourceLoss], Shortage | None]:
        self._pending = []  # those of an attempt that ran out of memory
        return super()._attempt(model, micro_batches, n_items=n_items)

    def _select_inputs(self, batch: Batch) -> Batch:
        return batch

    def _model_loss(self, model: nn.Module, inputs: Batch, *, return_outputs: bool, n_items: Any) -> Any:
        losses, figures = self.compute_rows(model, inputs)
        figures = {"loss": Figure(losses), **figures}
        self._pending.append({name: sum_rows(figure) for name, figure in figures.items()})
        # DDP, FSDP and DeepSpeed take the mean of the processes' gradients.
        loss = losses.sum() * (self.accelerator.num_processes / n_items)
        if self._check_loss is not None:
            self._check_loss(loss.detach())
        self.heartbeat.enter("backward")
        return loss

    def _count_losses(self, losses: list[SourceLoss], label_tokens: Any) -> None:
        """Count nothing: `compute_rows` gives the losses of rows, and a line of metrics takes their mean."""


def sum_rows(figure: Figure) -> Tensor:
    """Return the sum over the rows that have the figure, and their number: fp64 [2]."""
    where = torch.ones_like(figure.values, dtype=torch.bool) if figure.where is None else figure.where
    total = torch.where(where, figure.values.detach(), 0).sum(dtype=torch.float64)
    return torch.stack([total, where.sum().double()])


def turn_dropout_off(model: nn.Module) -> int:
    """Let no layer of `model`, or of its adapter, drop anything from now on; return how many did."""
    layers = 0
    for module in model.modules():
        is_layer = isinstance(module, nn.Dropout)
        shares = {name for name, value in vars(module).items() if isinstance(value, float) and value > 0}
        for name in shares & {"p"} if is_layer else {name for name in shares if "dropout" in name}:
            setattr(module, name, 0.0)
            layers += 1
    return layers


class PreferenceTrainer(PairMixin, ExactBatchMixin, Trainer):
    """Learns which of two completions is better (dpo, ipo, orpo, simpo), or from single ones (kto).

    `references` are the reference's log-probabilities, which a callback sets before the first step.
    """

    def __init__(self, step: StepSetup, *, cfg: RunConfig, **named: Any) -> None:
        is_chunked = step.loss_head == "chunked"
        # The heads of other losses are of no use: `completion_logps` narrows the head itself.
        super().__init__(step if is_chunked else replace(step, loss_head=""), **named)
        self.cfg = cfg
        self.references: Any = None
        self._point: Tensor | None = None  # KTO's reference point
        self._point_batches = AdaptiveBatches(
            self.args.per_device_eval_batch_size,
            "the pass over mismatched answers",
            fix=ADVICE if self.micro_batcher is None else "",
        )
        with self.compute_loss_context_manager():
            if is_chunked:
                put_chunked_logps(unwrap(self.model))
            self.shares_prompt = decide_shared_prompt(cfg, self.model)

    def compute_rows(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Figures]:
        if self.cfg.task.takes_answers:
            return self._compute_answers(model, batch)
        logps, tokens = completion_logps(model, batch, shares=self.shares_prompt)
        reference = self._look_up(batch)
        losses = pair_losses(self.cfg, logps, tokens, reference)
        with torch.no_grad():
            rewards = compute_rewards(self.cfg, logps, tokens, reference)
            margins = rewards[:, 0] - rewards[:, 1]
            figures = {
                "rewards/chosen": Figure(rewards[:, 0]),
                "rewards/rejected": Figure(rewards[:, 1]),
                "rewards/margins": Figure(margins),
                "rewards/accuracies": Figure((margins.sign() + 1) / 2),
                "logps/chosen": Figure(logps[:, 0]),
                "logps/rejected": Figure(logps[:, 1]),
            }
            if reference is not None:
                figures["kl"] = Figure((logps - reference).mean(1))
            figures |= {"tokens/chosen": Figure(tokens[:, 0]), "tokens/rejected": Figure(tokens[:, 1])}
        return losses, figures

    def _compute_answers(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Figures]:
        sums, counts = completion_logps(model, batch, shares=False, sides="first")
        logps, reference, wanted = sums[:, 0], self._look_up(batch), batch["desirable"]
        assert reference is not None
        assert self._point is not None
        ratios = logps - reference[:, 0]
        losses = kto_losses(self.cfg, ratios, wanted, reference_point=self._point.to(ratios.dtype))
        with torch.no_grad():
            rewards = compute_rewards(self.cfg, sums, counts, reference)[:, 0]
            figures = {
                "rewards/chosen": Figure(rewards, wanted),
                "rewards/rejected": Figure(rewards, ~wanted),
                "logps/chosen": Figure(logps, wanted),
                "logps/rejected": Figure(logps, ~wanted),
                "kl": Figure(ratios),
                "reference_point": Figure(self._point.expand_as(ratios)),
                "tokens/chosen": Figure(counts[:, 0], wanted),
                "tokens/rejected": Figure(counts[:, 0], ~wanted),
            }
        return losses, figures

    def get_batch_samples(self, epoch_iterator: Iterator[Batch], num_batches: int, device: torch.device) -> Any:
        """Return the batches of a step and its rows. In kto they are passed once here for their reference point."""
        batches, rows = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self.cfg.task.takes_answers and batches:
            self._point = self._find_reference_point(batches)
        return batches, rows

    def _take_means(self) -> dict[str, float | None]:
        means = super()._take_means()
        chosen, rejected = means.get("rewards/chosen"), means.get("rewards/rejected")
        if self.cfg.task.takes_answers and chosen is not None and rejected is not None:
            means["rewards/margins"] = chosen - rejected
        return means

    def _look_up(self, batch: Batch) -> Tensor | None:
        if not uses_reference(self.cfg):
            return None
        assert self.references is not None, "the reference's log-probabilities were not computed"
        return self.references.look_up("train", batch["index"])

    @torch.no_grad()
    def _find_reference_point(self, batches: Iterable[Batch]) -> Tensor:
        """Compute KTO's reference point over these batches of all ranks, which have as many each."""
        is_sharded = self.micro_batcher is None
        model = self.model_wrapped if is_sharded else self.model
        sums = torch.zeros(2, dtype=torch.float64, device=self.args.device)

        def measure(batch: Batch, rows: Tensor, part: slice) -> Tensor:
            self.heartbeat.enter("forward")
            batch = {key: value[rows[part]].to(self.args.device) for key, value in batch.items()}
            logps, tokens = completion_logps(model, batch, shares=False, sides="second")
            reference = self._look_up(batch)
            assert reference is not None
            is_row = tokens[:, 1] > 0
            ratios = torch.where(is_row, logps[:, 1] - reference[:, 1], 0)
            return torch.stack([ratios.sum(dtype=torch.float64), is_row.sum().double()])

        with self.compute_loss_context_manager(), eval_mode(model):
            for batch in batches:
                rows = torch.argsort(batch["attention_mask"].sum(1), descending=True, stable=True)
                sums = sum(self._point_batches.map(len(rows), partial(measure, batch, rows)), sums)
        if log.world_size() > 1:
            with self.heartbeat.within("communication"):
                torch.distributed.all_reduce(sums)
        return reference_point(sums[0], int(sums[1]))


def decide_shared_prompt(cfg: RunConfig, model: Any) -> bool:
    """Decide whether pairs compute their prompt once. Raise ConfigError where they shall, and the proof fails."""
    wanted = cfg.preference.shared_prompt
    if cfg.task.takes_answers or wanted is False:
        return False
    if prove(model):
        return True
    what = "with the prompt of a pair computed once this model gives its answers other probabilities"
    if wanted is True:
        fix = "write preference.shared_prompt: auto, which takes two rows"
        raise ConfigError(what, where="preference.shared_prompt true", fix=fix)
    log.say(f"note: {what}: each answer is a row with a prompt of its own")
    return False
