"""Train a few steps on the longest rows in a process of its own and measure their memory."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor

from sftplay.config.layers import RESOLVED
from sftplay.config.load import load_resolved
from sftplay.config.run import RunConfig
from sftplay.errors import ran_out_of_memory
from sftplay.launch.run_folder import RunFolder
from sftplay.model.embedding_rows import add_rows
from sftplay.model.load import load_base
from sftplay.model.tokenizer import load_extended
from sftplay.plan.fit import NoFit, Point, fit
from sftplay.signals import die_with_parent
from sftplay.tasks.sft import task as sft
from sftplay.train.exact_batch import StepSetup
from sftplay.train.metrics import Observer
from sftplay.train.micro_batches import MicroBatcher
from sftplay.train.run_task import make_trainable
from sftplay.train.task import Rows, TrainerParts
from sftplay.train.train_run import make_setup


class MemoryGauge:
    """Keeps the largest peak of each phase inside a `with`: what torch's allocator hands out on this process's GPU.

    A subclass measures another memory.
    """

    def __init__(self) -> None:
        self.peaks_bytes: dict[str, int] = {}
        self._phase: str | None = None
        self._reserved = 0

    def __enter__(self) -> MemoryGauge:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def enter(self, phase: str | None) -> None:
        """End the phase before; peaks belong to `phase` from now on."""
        if self._phase is not None:
            self.peaks_bytes[self._phase] = max(self.peaks_bytes.get(self._phase, 0), self.peak())
        self._phase = phase
        if phase is not None:
            self.restart()

    def take(self) -> dict[str, int]:
        """Return peaks by phase since the last call."""
        self.enter(None)
        taken, self.peaks_bytes = self.peaks_bytes, {}
        return taken

    def follow(self, model: Any) -> None:
        """Count what `model` holds already."""

    def restart(self) -> None:
        """Count peaks from now on."""
        self.reserved_bytes()
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        """Return the most bytes since `restart`."""
        return torch.cuda.max_memory_allocated()

    def wait(self) -> None:
        """Wait until the device is idle."""
        torch.cuda.synchronize()

    def release_cached(self) -> None:
        """Give back what is only cached."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self._reserved = 0

    def reserved_bytes(self) -> int | None:
        """Return the most the allocator has held since `release_cached`; None without one."""
        self._reserved = max(self._reserved, torch.cuda.max_memory_reserved())
        return self._reserved

    def device(self) -> dict[str, int] | None:
        """Return total, free and reserved bytes of the device now; None without one."""
        free, total = torch.cuda.mem_get_info()
        return {"total_bytes": total, "free_bytes": free, "reserved_bytes": torch.cuda.memory_reserved()}


REQUEST, MEASURED = "request.json", "measured.json"

ACCUMULATED = 2  # micro-batches of a measured step: from the second on, gradients exist during forward and backward

SKIPPED = 16  # steps that fp16's scaler may skip before one counts


@dataclass(frozen=True, kw_only=True)
class Request:
    """A measurement: micro-batches of `rows`, and of `if_bent` too when the points of the others form no line."""

    rows: tuple[int, ...]
    if_bent: int | None = None
    accumulates: bool = True
    repeats: int = 1
    """Measured steps of each size. One step before them is not measured: the optimizer's state appears in it."""

    gauge: str = f"{__name__}:MemoryGauge"  # `module:class` of the gauge

    @property
    def most_rows(self) -> int:
        return max(*self.rows, self.if_bent or 0)

    @property
    def micro_batches(self) -> int:
        return ACCUMULATED if self.accumulates else 1


def main(folder: str) -> int:
    """Read the config and the request in `folder` and leave what was measured next to them."""
    die_with_parent()
    here = RunFolder(Path(folder))
    fields = here.read_json(REQUEST)
    request = Request(**{**fields, "rows": tuple(fields["rows"])})
    module, _, kind = request.gauge.partition(":")
    gauge: MemoryGauge = getattr(import_module(module), kind)()
    here.write_json(MEASURED, measure_steps(load_resolved(here.path / RESOLVED), here, request=request, gauge=gauge))
    return 0


def measure_steps(cfg: RunConfig, folder: RunFolder, *, request: Request, gauge: MemoryGauge) -> dict[str, Any]:
    """Return points by micro-batch, and the micro-batch that ran out of memory, if one did. `cfg` is resolved; the
    gauge also counts the loading of the model.
    """
    sizes = {
        "train.effective_batch_size": request.most_rows * request.micro_batches,
        "train.batch_size": request.most_rows,
        "train.grad_accum": request.micro_batches,
        "train.max_steps": (len(request.rows) + 1) * (1 + request.repeats) + SKIPPED,
    }
    # Nothing is measured or written between steps.
    quiet = {"logging.backend": "none", "train.best_metric": None, "train.early_stopping": None, "eval.before": False}
    cfg = cfg.with_values({**sizes, **quiet, "train.dataloader_num_workers": 0}, "probe")
    nothing_kept = {"save_strategy": "no", "eval_strategy": "no", "logging_strategy": "no"}
    with gauge:
        tokenizer, new_tokens = load_extended(cfg)
        model = load_base(cfg)
        add_rows(model, new_tokens)
        model = make_trainable(model, cfg, new_ids=[token.id for token in new_tokens])
        gauge.follow(model)
        rows = synthetic_rows(cfg, tokenizer, count=request.most_rows * request.micro_batches)
        setup, schedule = make_setup(cfg, folder, n_rows=len(rows)), ProbeSchedule(cfg, request, gauge=gauge)
        trainer = sft.build_trainer(
            TrainerParts(
                cfg=cfg,
                model=model,
                tokenizer=tokenizer,
                train=rows.select(setup.order),
                held_out=None,
                rows=Rows(train=rows, held_out=None, report={}),
                folder=folder,
                arguments={**setup.arguments(has_held_out=False), **nothing_kept},
                callbacks=[schedule],
                # No replay: running out of memory is what is measured.
                step=StepSetup(micro_batcher=schedule, loss_head=str(cfg.train.loss_head)),
            )
        )
        schedule.attach(trainer)
        out_of_memory_rows = None
        try:
            trainer.train()
        except RuntimeError as error:
            if not ran_out_of_memory(error):
                raise
            out_of_memory_rows = schedule.rows
    return {
        "points": [asdict(point) for point in schedule.points],
        "accumulates": request.accumulates,
        "out_of_memory_rows": out_of_memory_rows,
        "device": gauge.device(),
    }


def synthetic_rows(cfg: RunConfig, tokenizer: Any, *, count: int) -> Dataset:
    """Make full rows of ordinary tokens that all have a label, the largest that a run can have; a block of documents
    kept apart is two of them.
    """
    rng, special = random.Random(0), set(tokenizer.all_special_ids)
    # Ids with a meaning of their own in the model, such as the place of an image, are among the special ones.
    ordinary = [token for token in range(min(len(tokenizer), 1000)) if token not in special]
    length = cfg.row_tokens
    rows = [rng.choices(ordinary, k=length) for _ in range(count)]
    half = length if cfg.cpt.cross_document else length // 2
    positions = {"position_ids": [*range(half), *range(length - half)]} if cfg.learns_documents else {}
    return Dataset.from_list([{"input_ids": ids, "labels": ids, "row": n, **positions} for n, ids in enumerate(rows)])


class ProbeSchedule(Observer):
    """Says which micro-batch size comes next, tells the gauge the phase of the step, and keeps the points. It is also
    the micro-batcher of the trainer's windows.
    """

    def __init__(self, cfg: RunConfig, request: Request, *, gauge: MemoryGauge) -> None:
        self.points: list[Point] = []
        self.rows = request.rows[0]
        self._cfg, self._request, self._gauge = cfg, request, gauge
        self._left = list(request.rows[1:])
        self._is_warm, self._started = False, 0.0
        self._seconds: list[float] = []

    def cut(self, window: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """Yield the first micro-batches of `rows` rows each, cut as the run cuts."""
        micro_batcher = MicroBatcher(self.rows, self._cfg.packs_rows, self._cfg.row_tokens)
        return islice(micro_batcher.cut(window), self._request.micro_batches)

    def attach(self, trainer: Any) -> None:
        """Tell the gauge where a forward pass begins, and where a backward pass comes from the loss to the layers."""
        super().attach(trainer)
        model = trainer.model
        whole = model.get_base_model() if hasattr(model, "get_base_model") else model

        def _mark_layers(_module: Any, _inputs: Any, out: Any) -> None:
            if out[0].requires_grad:
                out[0].register_hook(lambda _gradient: self._gauge.enter("layer"))

        whole.base_model.register_forward_pre_hook(lambda *_: self._gauge.enter("head"))
        whole.base_model.register_forward_hook(_mark_layers)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._gauge.wait()
        self._started = time.perf_counter()
        self._gauge.enter("head")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._gauge.enter("step")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._gauge.wait()
        seconds = time.perf_counter() - self._started
        if not self._is_warm:
            self._gauge.take()
            self._is_warm = not self.trainer.accelerator.optimizer_step_was_skipped
            return
        self._seconds.append(seconds)
        if len(self._seconds) < self._request.repeats:
            return
        tokens, peaks = self.rows * self._cfg.row_tokens, self._gauge.take()
        self.points.append(Point(self.rows, tokens, peaks, self._gauge.reserved_bytes(), min(self._seconds)))
        self._gauge.release_cached()
        self._is_warm, self._seconds = False, []
        more = self._request.if_bent
        measured = [point.rows for point in self.points]
        if not self._left and more and more not in measured and isinstance(fit(self.points), NoFit):
            self._left = [more]
        if self._left:
            self.rows = self._left.pop(0)
        else:
            control.should_training_stop = True


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
