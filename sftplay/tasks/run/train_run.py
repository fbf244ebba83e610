"""The ceremony every trainer shares: seed, library arguments, callbacks, preflight, resume, checkpoints, record.

It knows nothing of a task's rows or loss.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import set_seed
from transformers.integrations import TensorBoardCallback

from sftplay import log
from sftplay.config.schema.cluster import SHARDED
from sftplay.config.schema.run import RunConfig
from sftplay.data.order import order_hash, steps_for, training_order
from sftplay.errors import ConfigError
from sftplay.heartbeat import Heartbeat, heartbeat_path
from sftplay.launch.run_folder import RunFolder
from sftplay.monitor.checkpoints import read_marker, step_of
from sftplay.monitor.disk import WarnOfFullDisk
from sftplay.monitor.gradient_sync import GradientSync
from sftplay.monitor.guards import StopOnBadStep, StopOnSignal, StopWithoutProgress
from sftplay.monitor.interval import CostModel
from sftplay.monitor.metrics import MetricsWriter
from sftplay.monitor.out_of_memory import OutOfMemory, held_bytes, ran_out_of_memory
from sftplay.monitor.phases import TrackPhases
from sftplay.monitor.profiler import ProfileSteps
from sftplay.monitor.time_limit import StopInTime, find_deadline, process_start_s
from sftplay.plan.memory.cards import find_card
from sftplay.plan.memory.kit_execution import execution_of
from sftplay.plan.report.flops import ModelFlops, model_flops
from sftplay.plan.shape.from_config import shape_from_config
from sftplay.tasks.run.checkpointing import MarkComplete, Watched, accept_numbered_cpus, choose_checkpoint
from sftplay.tasks.run.preflight import Preflight
from sftplay.tasks.step.micro_batches import MicroBatcher
from sftplay.tasks.step.replay import ADVICE, Replay
from sftplay.units import format_bytes


@dataclass(frozen=True)
class Outcome:
    """How training ended: at which step, after how much wall and CPU time, by which signal (0 for none)."""

    step: int
    train_seconds: float
    train_cpu_seconds: float
    stop_signal: int


class TrainRun:
    """One attempt at a run, on one rank. `cfg` is the resolved config: no value of it is `auto`."""

    def __init__(self, cfg: RunConfig, folder: RunFolder, stop: StopOnSignal) -> None:
        self.cfg, self.folder, self.stop = cfg, folder, stop
        self.world_size = log.world_size()
        self.is_sharded = self.world_size > 1 and cfg.cluster.strategy in SHARDED
        self.heartbeat = Heartbeat()
        # Where weights are split, ranks meet inside every piece: none can be run again by itself.
        self.replay = Replay(cfg, folder) if cfg.train.oom_recovery and not self.is_sharded else None
        set_seed(cfg.seed)

    def order_rows(self, n_rows: int, identity: dict[str, Any] | None = None) -> list[int]:
        """The rows of the whole run in training order: exactly steps x effective batch of them.

        `identity` is what `fingerprint_of` says of the run; with it a resume can name what has changed.
        """
        train, self.identity = self.cfg.train, identity or {}
        self.steps_per_epoch = max(1, math.ceil(n_rows / train.effective_batch_size))
        self.steps = train.max_steps or steps_for(n_rows, train.epochs, train.effective_batch_size)
        order = training_order(n_rows, self.steps * train.effective_batch_size, self.cfg.seed)
        self.order_hash = order_hash(order)
        return order

    def arguments(self, *, has_held_out: bool) -> dict[str, Any]:
        """Arguments for a TRL config: every one the kit decides, then the user's `train.extra`."""
        cfg, train = self.cfg, self.cfg.train
        os.environ["TENSORBOARD_LOGGING_DIR"] = str(self.folder.path / "tb")
        return {
            "output_dir": str(self.folder.checkpoints),
            "run_name": self.folder.name,
            **self._sizes(),
            "per_device_eval_batch_size": train.batch_size,
            "num_train_epochs": 1,
            "max_steps": self.steps,
            "train_sampling_strategy": "sequential",
            "remove_unused_columns": False,
            "average_tokens_across_devices": True,
            "learning_rate": train.peak_rate,
            "lr_scheduler_type": train.lr_scheduler,
            "warmup_steps": math.ceil(train.warmup_ratio * self.steps),
            "weight_decay": train.weight_decay,
            "max_grad_norm": train.max_grad_norm,
            "optim": train.optim,
            "neftune_noise_alpha": train.neftune_alpha,
            "logging_strategy": "steps",
            "logging_steps": cfg.logging.steps,
            "logging_nan_inf_filter": False,
            "report_to": cfg.logging.backend,
            "disable_tqdm": True,
            "seed": cfg.seed,
            "data_seed": cfg.seed,
            "dataloader_num_workers": train.dataloader_num_workers,
            "dataloader_pin_memory": train.dataloader_pin_memory,
            "prediction_loss_only": True,
            **self._device_arguments(),
            **self._intervals(has_held_out),
            **train.extra,
        }

    def _sizes(self) -> dict[str, Any]:
        """A whole window at a time, which is cut here, or pieces that the Trainer accumulates."""
        train = self.cfg.train
        rows, pieces = train.effective_batch_size // self.world_size, 1
        if self.is_sharded:
            rows, pieces = int(train.batch_size), int(train.grad_accum)
        return {"per_device_train_batch_size": rows, "gradient_accumulation_steps": pieces}

    def _device_arguments(self) -> dict[str, Any]:
        train, cpu, comm = self.cfg.train, not torch.cuda.is_available(), self.cfg.cluster.comm
        return {
            "bf16": train.precision == "bf16",
            "fp16": train.precision == "fp16",
            "use_cpu": cpu and not self.is_sharded,  # else accelerate takes neither DeepSpeed nor FSDP, in silence
            "ddp_backend": "gloo" if cpu and self.world_size > 1 else None,
            "ddp_find_unused_parameters": False if self.world_size > 1 else None,
            # Sent before a forward pass, they would leave a rank waiting for one that failed before it.
            "ddp_broadcast_buffers": False if self.world_size > 1 else None,
            "ddp_bucket_cap_mb": comm.bucket_cap_mb if self.world_size > 1 else None,
            "ddp_static_graph": comm.static_graph if self.world_size > 1 else None,
            "ddp_timeout": self.cfg.cluster.timeout,
            "gradient_checkpointing": train.gradient_checkpointing,
            "gradient_checkpointing_kwargs": {"use_reentrant": False} if train.gradient_checkpointing else None,
        }

    def _intervals(self, has_held_out: bool) -> dict[str, Any]:
        train = self.cfg.train
        eval_steps = train.eval_steps or train.save_steps or self.steps_per_epoch
        seeks_best = has_held_out and (train.best_metric is not None or train.early_stopping is not None)
        # The best weights can only be kept if a checkpoint is written where they were measured.
        save_steps = train.save_steps or (eval_steps if seeks_best else self.steps_per_epoch)
        return {
            "eval_strategy": "steps" if has_held_out else "no",
            "eval_steps": eval_steps if has_held_out else None,
            "save_strategy": "steps",
            "save_steps": save_steps,
            "save_total_limit": None,  # ours, in MarkComplete: the Trainer removes before the new one is safe
            "load_best_model_at_end": seeks_best,
            "metric_for_best_model": "loss" if seeks_best else None,
            "greater_is_better": False if seeks_best else None,
        }

    def micro_batcher(self) -> MicroBatcher | None:
        """How the trainer's windows are cut into micro-batches; None where it gets them one by one."""
        if self.is_sharded:
            return None
        train, length = self.cfg.train, self.cfg.model.max_seq_len
        rows = int(train.batch_size)
        budget = rows * length if train.batching == "tokens" else None
        return MicroBatcher(rows, train.packing is True, length, budget)

    def callbacks(self) -> list[Any]:
        """What looks on while the run trains; also makes this run's meters."""
        facts = {**self.identity, "order_hash": self.order_hash, "config_sha256": self.fingerprint()}
        facts["world_size"] = self.world_size
        self.checkpoint = choose_checkpoint(self.cfg, self.folder, facts)
        self.from_step = step_of(self.checkpoint) if self.checkpoint else 0
        attempt = self._open_attempt(self.from_step)
        self.meters = MetricsWriter(self.folder.metrics, attempt=attempt, keep_row_ids=self.cfg.logging.row_ids)
        self.meters.seen |= read_marker(self.checkpoint).get("counters", {}) if self.checkpoint else {}
        self.bad_step = StopOnBadStep(self.folder.path / "bad_step.json")
        self.preflight = Preflight(self.cfg, self.folder)
        watched = Watched(self.meters, self.bad_step, self.stop)
        marks = MarkComplete(self.folder, facts, self.cfg.train.save_total_limit, watched)
        patience = self.cfg.train.early_stopping
        early = [StopWithoutProgress(early_stopping_patience=patience)] if patience else []
        self.heartbeat = self.stop.heartbeat = Heartbeat(heartbeat_path(self.folder.logs, log.rank()), pid=os.getpid())
        self.traffic = GradientSync(self.cfg, self.heartbeat)
        # Once status.json shows the ranks, a stop signal ends the run behind a step, with a checkpoint.
        watching = [self.stop, self.preflight, self.meters, self.bad_step, marks, *early, *self._foresight()]
        return [*watching, self.traffic, TrackPhases(self.heartbeat)]

    def _foresight(self) -> list[Any]:
        train, checkpoints = self.cfg.train, self.folder.checkpoints
        deadline = find_deadline(train.time_limit, os.environ, started_s=process_start_s(), now_s=time.time())
        profile = ProfileSteps(train.profile, self.folder.path / "profile", self.heartbeat)
        return [
            WarnOfFullDisk(checkpoints, train.save_total_limit),
            *([StopInTime(deadline, self.stop)] if deadline else []),
            *([profile] if train.profile.steps else []),
        ]

    def fingerprint(self) -> str:
        """sha256 of the resolved config file, which every rank reads."""
        return hashlib.sha256(self.folder.resolved.read_bytes()).hexdigest()

    def train(self, trainer: Any) -> Outcome:
        """Train from the chosen checkpoint or from the start.

        Raises:
            OutOfMemory: memory does not suffice for a single row, or where no step is run again.
            RunError: a step is not finite, or the preflight found a wrong launch.
        """
        self.meters.window = self.bad_step.window = self.preflight.trainer = trainer
        self.preflight.note_weights(trainer.model)
        self.preflight.rows = f"{self.identity.get('rows_sha256')} {self.order_hash}"
        self.preflight.base = " ".join(sorted(self.identity.get("weights", {}).values()))
        trainer.heartbeat = self.heartbeat
        if trainer.is_deepspeed_enabled and not trainer.args.fp16:  # in fp16 its own scaler skips such steps
            trainer.look_at_loss = self.bad_step.look_at_loss
        self.traffic.attend(trainer)
        self.meters.facts = self._facts(trainer.model)
        # Trackers are registered first, but shall see what the meters add to a line.
        callbacks = trainer.callback_handler.callbacks
        callbacks.insert(0, callbacks.pop(callbacks.index(self.meters)))
        if self.from_step and log.is_main():
            self._cut_board_back(callbacks)
        if trainer.args.device.type == "cpu" and self.world_size > 1:
            accept_numbered_cpus()
        try:
            trainer.train(resume_from_checkpoint=str(self.checkpoint) if self.checkpoint else None)
        except RuntimeError as error:
            if not ran_out_of_memory(error):
                raise
            raise self._out_of_memory(trainer, error) from error
        state = trainer.state
        return Outcome(
            step=state.global_step,
            train_seconds=self.meters.train_seconds,
            train_cpu_seconds=self.meters.train_cpu_seconds,
            stop_signal=self.stop.received,
        )

    def _out_of_memory(self, trainer: Any, error: RuntimeError) -> OutOfMemory:
        """Why the run cannot go on, where its step is not one that is run again."""
        return OutOfMemory(
            f"out of memory in {self.heartbeat.phase} of step {trainer.state.global_step + 1}: "
            f"{format_bytes(held_bytes())} held ({str(error).splitlines()[0]})",
            where="training",
            fix=ADVICE,
            batch_size=self._smaller_batch(trainer.micro_batcher) if self.cfg.train.oom_recovery else None,
        )

    def _smaller_batch(self, micro_batcher: MicroBatcher | None) -> int | None:
        """Rows a piece with which another start may succeed; None when there are none."""
        share = self.cfg.train.effective_batch_size // self.world_size
        now = micro_batcher or MicroBatcher(int(self.cfg.train.batch_size))
        smaller = now.smaller(share) if now.micro_batch > 1 else None
        return smaller.micro_batch if smaller else None

    def _facts(self, model: Any) -> CostModel:
        plan = self.folder.read_json("plan.json")
        predicted = {f"predicted_{key}": plan[key] for key in ("peak_bytes", "allocated_bytes") if key in plan}
        flops = _flops_of(model, self.cfg)
        card = find_card(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
        # The table's peaks are those of 16-bit products.
        peak = card.tflops * 1e12 if card and self.cfg.train.precision != "fp32" else None
        return CostModel(flops.of_rows if flops else None, peak, predicted)

    def _cut_board_back(self, callbacks: list[Any]) -> None:
        for callback in callbacks:
            if isinstance(callback, TensorBoardCallback):
                from torch.utils.tensorboard import SummaryWriter

                # TensorBoard then hides what an earlier attempt wrote behind the checkpoint.
                callback.tb_writer = SummaryWriter(str(self.folder.path / "tb"), purge_step=self.from_step + 1)

    def _open_attempt(self, from_step: int) -> int:
        attempts = self.folder.read_json("status.json").get("attempts", [])
        if log.is_main():
            attempts = [*attempts, {"from_step": from_step, "to_step": None, "cause": None}]
            self.folder.update_status(state="running", attempts=attempts, step=from_step)
            return len(attempts)
        return len(attempts) + 1


def _flops_of(model: Any, cfg: RunConfig) -> ModelFlops | None:
    """What the model that trains needs for a row; None where its config does not say enough."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    # How the weights lie in memory changes no product.
    config = {key: value for key, value in base.config.to_dict().items() if key != "quantization_config"}
    try:
        return model_flops(shape_from_config(config, name=cfg.model.name), execution_of(cfg))
    except ConfigError:
        return None
