"""One attempt at a run on one rank: its callbacks, the checkpoint it continues from, and training itself.

It knows nothing of a task's rows or loss.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from datasets import Dataset, concatenate_datasets
from transformers.integrations import TensorBoardCallback

from sftplay import log
from sftplay.config.run import RunConfig
from sftplay.data.records import IGNORE_INDEX
from sftplay.errors import ConfigError, RunError, ran_out_of_memory, said_of_memory
from sftplay.heartbeat import Heartbeat, heartbeat_path
from sftplay.launch.checkpoints import newest_complete, read_marker, read_step
from sftplay.model.out_of_memory import OutOfMemory, held_bytes
from sftplay.plan.flops import ModelFlops, model_flops
from sftplay.train.checkpointing import MarkComplete, accept_numbered_cpus, choose_checkpoint
from sftplay.train.disk import WarnOfFullDisk
from sftplay.train.exact_batch import ADVICE, Replay, StepSetup
from sftplay.train.gradients import GradientSync
from sftplay.train.guards import StopInTime, StopOnBadStep, StopOnSignal, StopWithoutProgress, find_deadline
from sftplay.train.metrics import MetricsWriter, TrackPhases
from sftplay.train.micro_batches import MicroBatcher
from sftplay.train.observer import CostModel, Observer
from sftplay.train.preflight import GroupTimeout, Preflight
from sftplay.train.setup import RunSetup
from sftplay.train.task import Rows, TrainerParts
from sftplay.units import format_bytes


@dataclass(frozen=True)
class TrainResult:
    """The end of training: at which step, after how much wall and CPU time, by which signal (0 for none)."""

    step: int
    train_seconds: float
    train_cpu_seconds: float
    stop_signal: int


class TrainRun:
    """Chooses the checkpoint, builds the callbacks, and trains.

    `model` is the one that trains. With `fingerprint`, the result of `compute_fingerprint`, a resume can name what has
    changed. Raise ConfigError, DataError or RunError where the checkpoint to resume from belongs to another run.
    """

    def __init__(
        self, setup: RunSetup, model: Any, *, stop: StopOnSignal, fingerprint: dict[str, Any] | None = None
    ) -> None:
        self.setup, self.cfg, self.folder, self.stop, self.model = setup, setup.cfg, setup.folder, stop, model
        known = fingerprint or {}
        facts = {
            **known,
            "order_hash": setup.order_hash,
            "config_sha256": setup.config_sha256,
            "world_size": setup.world_size,
        }
        self.checkpoint = choose_checkpoint(self.cfg, self.folder, facts=facts)
        self.from_step = read_step(self.checkpoint) if self.checkpoint else 0
        attempts = [*self.folder.read_json("status.json").get("attempts", [])]
        attempts.append({"from_step": self.from_step, "to_step": None, "cause": None})
        if log.is_main():
            self.folder.update_status(attempts=attempts, step=self.from_step)
        marker = read_marker(self.checkpoint) if self.checkpoint else {}
        self.metrics = MetricsWriter(
            self.folder.metrics,
            attempt=len(attempts),
            keep_row_ids=self.cfg.logging.row_ids,
            costs=read_costs(model, self.cfg, plan=self.folder.read_json("plan.json")),
            counters=marker.get("counters"),
            sources=marker.get("sources"),
        )
        self.bad_step = StopOnBadStep(self.folder.path / "bad_step.json")
        preflight = Preflight(
            self.cfg,
            self.folder,
            rows=f"{known.get('rows_sha256')} {setup.order_hash}",
            base=" ".join(sorted(known.get("weights", {}).values())),
        )
        self.heartbeat = Heartbeat(heartbeat_path(self.folder.logs, log.rank()), pid=os.getpid())
        self.mark_complete = MarkComplete(
            self.folder, facts, metrics=self.metrics, bad_step=self.bad_step, stop=stop,
            limit=self.cfg.train.save_total_limit,
        )  # fmt: skip
        # A stop signal ends the run after a step, with a checkpoint, from the moment that status.json shows the ranks.
        self.callbacks = [
            stop, preflight, self.metrics, self.bad_step, self.mark_complete, *self._optional_callbacks(),
            GradientSync(self.cfg, self.heartbeat), TrackPhases(self.heartbeat),
            GroupTimeout(self.cfg.cluster.timeout, self.folder.logs),
        ]  # fmt: skip

    def _optional_callbacks(self) -> list[Any]:
        train, patience, callbacks = self.cfg.train, self.cfg.train.early_stopping, list[Any]()
        started_s = psutil.Process().create_time()
        deadline = find_deadline(train.time_limit, os.environ, started_s=started_s, now_s=time.time())
        if patience:
            callbacks.append(StopWithoutProgress(early_stopping_patience=patience))
        callbacks.append(WarnOfFullDisk(self.folder.checkpoints, train.save_total_limit))
        if deadline:
            callbacks.append(StopInTime(deadline, self.stop))
        if train.profile.steps:
            from sftplay.train.profiler import ProfileSteps

            callbacks.append(ProfileSteps(train.profile, self.folder.path / "profile", heartbeat=self.heartbeat))
        return callbacks

    def trainer_parts(self, tokenizer: Any, rows: Rows) -> TrainerParts:
        """Collect everything that the task builds its trainer of."""
        setup, held_out = self.setup, rows.held_out if rows.trainer_evaluates else None
        if held_out is not None and setup.world_size > 1:
            multiple = int(self.cfg.train.batch_size) * setup.world_size
            is_dataset = isinstance(held_out, Dataset)
            held_out = pad_to_multiple(held_out, multiple) if is_dataset else held_out.padded_to(multiple)
        # Where weights are sharded, ranks communicate inside every micro-batch: no rank can run one again alone.
        replays = self.cfg.train.oom_recovery and not setup.is_sharded
        return TrainerParts(
            cfg=self.cfg,
            model=self.model,
            tokenizer=tokenizer,
            train=rows.train.select(setup.order) if isinstance(rows.train, Dataset) else rows.train,
            held_out=held_out,
            rows=rows,
            folder=self.folder,
            arguments=setup.arguments(has_held_out=held_out is not None),
            callbacks=self.callbacks,
            step=StepSetup(
                micro_batcher=setup.micro_batcher(),
                loss_head=str(self.cfg.train.loss_head),
                replay=Replay(self.cfg, self.folder) if replays else None,
                heartbeat=self.heartbeat,
                check_loss=self.bad_step.check_loss,
                source_names=rows.source_names,
            ),
        )

    def attach(self, trainer: Any) -> None:
        """Hand the trainer to the callbacks that need it."""
        callbacks = trainer.callback_handler.callbacks
        for callback in callbacks:
            if isinstance(callback, Observer):
                callback.attach(trainer)
        # Trackers are registered first, but must see what the metrics add to a line.
        callbacks.insert(0, callbacks.pop(callbacks.index(self.metrics)))

    def train(self, trainer: Any) -> TrainResult:
        """Train from the chosen checkpoint or from the start.

        Raise OutOfMemory where memory does not suffice for a single row, or ran out where no step is run again;
        RunError where a step is not finite, the preflight found a wrong launch, or the best checkpoint is missing.
        """
        self.attach(trainer)
        for callback in trainer.callback_handler.callbacks:
            if log.is_main() and isinstance(callback, TensorBoardCallback):
                from torch.utils.tensorboard import SummaryWriter

                # TensorBoard then hides what an earlier attempt wrote after the checkpoint.
                purge_step = self.from_step + 1 if self.from_step else None
                callback.tb_writer = SummaryWriter(str(self.folder.path / "tb"), purge_step=purge_step)
        if trainer.args.device.type == "cpu" and self.setup.world_size > 1:
            accept_numbered_cpus()
        try:
            trainer.train(resume_from_checkpoint=str(self.checkpoint) if self.checkpoint else None)
        except RuntimeError as error:
            if not ran_out_of_memory(error):
                raise
            # Say with how many rows of a micro-batch another start may succeed.
            batch_size = None
            if self.cfg.train.oom_recovery:
                now = trainer.micro_batcher or MicroBatcher(int(self.cfg.train.batch_size))
                window_rows = self.cfg.train.effective_batch_size // self.setup.world_size
                smaller = now.smaller(window_rows) if now.micro_batch > 1 else None
                batch_size = smaller.micro_batch if smaller else None
            failure = OutOfMemory(
                f"out of memory in {self.heartbeat.phase} of step {trainer.state.global_step + 1}: "
                f"{format_bytes(held_bytes())} held ({said_of_memory(error)})",
                where="training",
                fix=ADVICE,
                batch_size=batch_size,
            )
            raise failure from error
        finally:
            self.mark_complete.close()
        best = trainer.state.best_model_checkpoint
        if trainer.args.load_best_model_at_end and not self.stop.received and not (best and Path(best).is_dir()):
            # The Trainer kept the last weights, because it did not find the best ones.
            sought = "lowest held-out loss" if trainer.args.metric_for_best_model == "loss" else "highest acc_t2"
            raise RunError(
                f"the checkpoint with the {sought} is missing{f': {best}' if best else ''}",
                where=str(self.folder.checkpoints),
                fix=f"put it back, then `make resume`; or take the last weights, "
                f"{newest_complete(self.folder.checkpoints)[0]}",
            )
        return TrainResult(
            step=trainer.state.global_step,
            train_seconds=self.metrics.train_seconds,
            train_cpu_seconds=self.metrics.train_cpu_seconds,
            stop_signal=self.stop.received,
        )


def read_costs(model: Any, cfg: RunConfig, *, plan: Mapping[str, Any]) -> CostModel:
    """Read what is known about the costs of a step: FLOPs of the model that trains, the GPU's peak, planned memory."""
    flops, card = None, None
    if counted := plan.get("model_flops"):
        flops = ModelFlops(**counted)
    elif cfg.task.reads_text:
        from sftplay.plan.memory_setup import read_memory_setup
        from sftplay.plan.shape_from_config import shape_from_config

        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        # How weights are stored changes no FLOP.
        config = {key: value for key, value in base.config.to_dict().items() if key != "quantization_config"}
        with suppress(ConfigError):  # the config does not say enough
            flops = model_flops(shape_from_config(config, name=cfg.model.name), read_memory_setup(cfg))
    if torch.cuda.is_available():
        from sftplay.plan.devices import find_card

        card = find_card(torch.cuda.get_device_name())
    # The table holds the peaks of 16-bit products.
    peak = card.tflops * 1e12 if card and cfg.train.precision != "fp32" else None
    predicted = {f"predicted_{key}": plan[key] for key in ("peak_bytes", "allocated_bytes") if key in plan}
    return CostModel(flops.of_rows if flops else None, peak, predicted)


def pad_to_multiple(rows: Dataset, multiple: int) -> Dataset:
    """Return `rows` with rows without a label added at the end, so that their number is a multiple of `multiple`.

    Where the last batches of several processes are not full, accelerate fills them with rows from the beginning, whose
    loss would count twice.
    """
    if len(rows) % multiple == 0:
        return rows
    padding = {**rows[0], "labels": [IGNORE_INDEX] * len(rows[0]["labels"])}
    return concatenate_datasets([rows, Dataset.from_list([padding] * (-len(rows) % multiple), features=rows.features)])
