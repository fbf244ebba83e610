"""transformers' Trainer over puzzles under way, its optimizer, and what a checkpoint holds of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Trainer

from sftplay import log
from sftplay.config.run import RunConfig
from sftplay.errors import RunError
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
from sftplay.tasks.hrm.network import PuzzleModel, State
from sftplay.tasks.hrm.puzzles.sampler import TrainBatches
from sftplay.train.eval_mode import random_numbers_kept
from sftplay.train.exact_batch import StepSetup, StepTrainerMixin, add_gradients
from sftplay.train.metrics import Observer


class AdamATan2(torch.optim.Optimizer):
    """Adam with decoupled weight decay; its update is lr * atan2(m, sqrt(v)) of the corrected moments.

    Published rates are those of the package adam-atan2 0.0.3, which has no factor (csrc/adam_atan2.cu): where both
    moments are equal, a step is lr * pi / 4.
    """

    def __init__(self, params: Any, *, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every weight that has a gradient."""
        loss = closure() if closure else None
        for group in self.param_groups:
            weights = [p for p in group["params"] if p.grad is not None]
            if not weights:
                continue
            for weight in weights:
                state = self.state[weight]
                if not state:
                    state["step"] = torch.zeros(())
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
                state["step"] += 1
            gradients, (beta1, beta2) = [weight.grad for weight in weights], group["betas"]
            first, second = ([self.state[weight][key] for weight in weights] for key in ("exp_avg", "exp_avg_sq"))
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_lerp_(first, gradients, 1 - beta1)
            torch._foreach_mul_(second, beta2)
            torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
            for weight, m, v in zip(weights, first, second, strict=True):
                steps = float(self.state[weight]["step"])
                correct1, correct2 = 1 - beta1**steps, 1 - beta2**steps
                weight.add_(torch.atan2(m / correct1, (v / correct2).sqrt()), alpha=-group["lr"])
        return loss


class MovingAverage:
    """Keeps decay * average + (1 - decay) * weight of each weight that the optimizer trains."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay = model, decay
        self.weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights of the model into the average."""
        now = dict(self.model.named_parameters())
        torch._foreach_lerp_(list(self.weights.values()), [now[name] for name in self.weights], 1 - self.decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within it the model has the averaged weights."""
        trained = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}
        self.model.load_state_dict(self.weights, strict=False)  # buffers stay as they are
        try:
            yield
        finally:
            self.model.load_state_dict(trained, strict=False)


SAMPLER = "sampler"
"""Key of the metadata of a rank's puzzles: where the next batch of rows begins."""


def save_progress(checkpoint: Path, *, carry: Carry, rows: dict[str, int], average: dict[str, Tensor] | None) -> None:
    """Write this rank's puzzles, the state of its sampler (`rows`) and, on the main one, the averaged weights.

    The rest of the checkpoint is there.
    """
    tensors = {**carry.state._asdict(), "steps": carry.steps, "halted": carry.halted, **carry.puzzles._asdict()}
    checkpoint.mkdir(parents=True, exist_ok=True)
    whole = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(whole, checkpoint / f"carry-{log.rank()}.safetensors", metadata={SAMPLER: json.dumps(rows)})
    if average is not None and log.is_main():
        save_file(average, checkpoint / "average.safetensors")


def load_progress(
    checkpoint: Path, device: torch.device, *, has_average: bool
) -> tuple[Carry, dict[str, int], dict[str, Tensor] | None]:
    """Load what `save_progress` takes, this rank's part of what all ranks have saved, on `device`.

    The ranks may be more or fewer than they were: together they have the puzzles of the whole batch, in rank order.
    Raise RunError where a file is missing, because another task has written the checkpoint.
    """

    def read(name: str) -> dict[str, Tensor]:
        path = checkpoint / f"{name}.safetensors"
        if not path.is_file():
            fix = "continue from a checkpoint of task mode hrm with the same hrm.ema"
            raise RunError("there is no such file in the checkpoint", where=str(path), fix=fix)
        # safetensors knows no `cpu:0`, which accelerate calls the device of each of several processes on CPUs.
        return {name: tensor.to(device) for name, tensor in load_file(path).items()}

    n_files = max(1, len(list(checkpoint.glob("carry-*.safetensors"))))
    parts = [read(f"carry-{rank}") for rank in range(n_files)]
    share = sum(len(part["steps"]) for part in parts) // log.world_size()
    rows = slice(log.rank() * share, (log.rank() + 1) * share)
    found = {name: torch.cat([part[name] for part in parts])[rows] for name in parts[0]}
    state = State(*(found[name] for name in State._fields))
    puzzles = Puzzles(*(found[name] for name in Puzzles._fields))
    with safe_open(checkpoint / "carry-0.safetensors", framework="pt") as opened:
        sampler = json.loads(opened.metadata()[SAMPLER])
    average = read("average") if has_average else None
    return Carry(state, found["steps"], found["halted"], puzzles), sampler, average


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
