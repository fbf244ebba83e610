"""Rehearses a run: a few real optimizer steps of its own code on rows of full length, to see what they take.

A process of its own, so that the run's random numbers and the GPU's memory are as if it had never been. The weights it
makes are thrown away, and no row of the user's data is read.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import TrainerCallback

from sftplay.config.load import load_resolved
from sftplay.config.schema.run import RunConfig
from sftplay.launch.run_folder import RESOLVED, RunFolder
from sftplay.model.load import load_base
from sftplay.model.tokenizer import load_tokenizer
from sftplay.monitor.guards import StopOnSignal
from sftplay.plan.memory.probe_fit import Point, Refusal, fit
from sftplay.signals import die_with_parent
from sftplay.tasks import sft
from sftplay.tasks.rehearse.memory_gauges import CUDA_GAUGE, MemoryGauge, load_gauge
from sftplay.tasks.run.train_run import TrainRun
from sftplay.tasks.step.micro_batches import MicroBatcher

REQUEST, MEASURED = "request.json", "measured.json"

ACCUMULATED = 2
"""Micro-batches of a rehearsed step: from the second on, gradients lie there during forward and backward."""

SKIPPED = 16
"""Steps that fp16's scaler may throw away before one counts."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to measure: micro-batches of `rows`, and of `if_bent` too when no line goes through the others."""

    rows: tuple[int, ...]
    if_bent: int | None = None
    accumulates: bool = True
    repeats: int = 1
    """Measured steps of each size, after one that is not: the optimizer's state appears in it."""

    gauge: str = CUDA_GAUGE
    """`module:class` of the gauge."""

    @property
    def most_rows(self) -> int:
        return max(*self.rows, self.if_bent or 0)

    @property
    def pieces(self) -> int:
        return ACCUMULATED if self.accumulates else 1


def main(folder: str) -> int:
    """Read the config and the request in `folder` and leave what was measured beside them."""
    die_with_parent()
    here = RunFolder(Path(folder))
    asked = here.read_json(REQUEST)
    request = Request(**{**asked, "rows": tuple(asked["rows"])})
    cfg = load_resolved(here.path / RESOLVED)
    here.write_json(MEASURED, rehearse(cfg, here, request, gauge=load_gauge(request.gauge)))
    return 0


def rehearse(cfg: RunConfig, folder: RunFolder, request: Request, *, gauge: MemoryGauge) -> dict[str, Any]:
    """Points by micro-batch, and the micro-batch that ran out of memory, if one did.

    `cfg` is resolved; its effective batch and its data have no effect. The gauge counts what is there from the loading
    of the model on.
    """
    cfg = _rehearsed(cfg, request)
    with gauge:
        tokenizer = load_tokenizer(cfg.model)
        model = sft.make_trainable(load_base(cfg), cfg)
        gauge.follow(model)
        rows = synthetic_rows(cfg, tokenizer, request.most_rows * request.pieces)
        run = Rehearsal(cfg, folder, Conductor(cfg, request, gauge))
        order = run.order_rows(len(rows))
        examples = SimpleNamespace(train=rows, held_out=None)
        parts = {"model": model, "tokenizer": tokenizer, "examples": examples, "order": order}
        trainer = sft.build_trainer(cfg, run, parts)
        run.conductor.attend(trainer)
        exhausted = _played(trainer, run.conductor)
    return {
        "points": [asdict(point) for point in run.conductor.points],
        "accumulates": request.accumulates,
        "out_of_memory_rows": exhausted,
        "device": gauge.device(),
    }


def _played(trainer: Any, conductor: Conductor) -> int | None:
    """Train until the conductor has seen enough; the rows of a micro-batch for which memory did not suffice."""
    try:
        trainer.train()
    except torch.OutOfMemoryError:
        return conductor.rows
    return None


def _rehearsed(cfg: RunConfig, request: Request) -> RunConfig:
    """The config with steps of so many rows, nothing measured or written between them."""
    sizes = {
        "train.effective_batch_size": request.most_rows * request.pieces,
        "train.batch_size": request.most_rows,
        "train.grad_accum": request.pieces,
        "train.max_steps": (len(request.rows) + 1) * (1 + request.repeats) + SKIPPED,
    }
    quiet = {"logging.backend": "none", "train.best_metric": None, "train.early_stopping": None, "eval.before": False}
    return cfg.with_values({**sizes, **quiet, "train.dataloader_num_workers": 0}, "probe")


def synthetic_rows(cfg: RunConfig, tokenizer: Any, count: int) -> Dataset:
    """Rows of `max_seq_len` ordinary tokens that all carry a label: the most a run's rows can be."""
    rng, special = random.Random(0), set(tokenizer.all_special_ids)
    # Ids a model gives a meaning of their own, such as the place of an image, lie among the special ones.
    ordinary = [each for each in range(min(len(tokenizer), 1000)) if each not in special]
    rows = [rng.choices(ordinary, k=cfg.model.max_seq_len) for _ in range(count)]
    return Dataset.from_list([{"input_ids": ids, "labels": ids, "row": n} for n, ids in enumerate(rows)])


class Conductor(TrainerCallback):
    """Says which micro-batch comes next, tells the gauge where in a step the trainer is, and keeps the points.

    It is also the micro_batcher of the trainer's windows, of which it lets through only as many pieces as are wanted.
    """

    def __init__(self, cfg: RunConfig, request: Request, gauge: MemoryGauge) -> None:
        self.points: list[Point] = []
        self.rows = request.rows[0]
        self._cfg, self._request, self._gauge = cfg, request, gauge
        self._left = list(request.rows[1:])
        self._warm, self._seconds = False, [0.0] * 0
        self._started = 0.0
        self._trainer: Any = None

    def cut(self, window: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """The first pieces of `rows` rows each, cut as the run cuts."""
        micro_batcher = MicroBatcher(self.rows, self._cfg.train.packing is True, self._cfg.model.max_seq_len)
        return islice(micro_batcher.cut(window), self._request.pieces)

    def attend(self, trainer: Any) -> None:
        """Be told when a forward pass begins and when the backward pass leaves the loss head for the layers."""
        self._trainer, model = trainer, trainer.model
        whole = model.get_base_model() if hasattr(model, "get_base_model") else model
        whole.base_model.register_forward_pre_hook(lambda *_: self._gauge.enter("head"))
        whole.base_model.register_forward_hook(self._mark_layers)

    def _mark_layers(self, _module: Any, _inputs: Any, out: Any) -> None:
        hidden = out[0]
        if hidden.requires_grad:
            hidden.register_hook(lambda _gradient: self._gauge.enter("layer"))

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._gauge.wait()
        self._started = time.perf_counter()
        self._gauge.enter("head")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._gauge.enter("step")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._gauge.wait()
        seconds = time.perf_counter() - self._started
        if not self._warm:
            self._gauge.take()
            self._warm = not self._trainer.accelerator.optimizer_step_was_skipped
            return
        self._seconds.append(seconds)
        if len(self._seconds) == self._request.repeats:
            self._keep_point()
            control.should_training_stop = not self._go_on()

    def _keep_point(self) -> None:
        tokens = self.rows * self._cfg.model.max_seq_len
        peaks, fastest = self._gauge.take(), min(self._seconds)
        self.points.append(Point(self.rows, tokens, peaks, self._gauge.reserved_bytes(), fastest))
        self._gauge.settle()
        self._warm, self._seconds = False, []

    def _go_on(self) -> bool:
        """Take the next micro-batch; False when there is none."""
        more = self._request.if_bent
        measured = [point.rows for point in self.points]
        if not self._left and more and more not in measured and isinstance(fit(self.points), Refusal):
            self._left = [more]
        if not self._left:
            return False
        self.rows = self._left.pop(0)
        return True


class Rehearsal(TrainRun):
    """A run that keeps nothing and is led by a conductor."""

    def __init__(self, cfg: RunConfig, folder: RunFolder, conductor: Conductor) -> None:
        super().__init__(cfg, folder, StopOnSignal())
        self.replay = None  # what memory does not suffice for is the measurement
        self.conductor = conductor

    def arguments(self, *, has_held_out: bool) -> dict[str, Any]:
        """As in the run, without checkpoints and lines."""
        usual = super().arguments(has_held_out=has_held_out)
        return {**usual, "save_strategy": "no", "eval_strategy": "no", "logging_strategy": "no"}

    def micro_batcher(self) -> Any:
        return self.conductor

    def callbacks(self) -> list[Any]:
        return [self.conductor]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
