"""One attempt at a run on one rank: steps, order of the rows, library arguments, callbacks, checkpoint, and training.

It knows nothing of a task's rows or loss.
"""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from datasets import Dataset, concatenate_datasets
from transformers.integrations import TensorBoardCallback

from sftplay import __version__, log
from sftplay.config.run import RunConfig
from sftplay.data.pipeline import order_hash, steps_for, training_order
from sftplay.data.records import IGNORE_INDEX
from sftplay.errors import ConfigError, MachineError, RunError, ran_out_of_memory, said_of_memory
from sftplay.heartbeat import Heartbeat, heartbeat_path
from sftplay.launch.checkpoints import newest_complete, read_marker, read_step
from sftplay.launch.cost import count_gpus, new_attempt
from sftplay.launch.run_folder import EXPECTS_GPU, RunFolder
from sftplay.machine.probe import probe
from sftplay.model.hub import find_commit
from sftplay.model.out_of_memory import OutOfMemory, held_bytes
from sftplay.model.recomputation import as_named_here, recomputation_arguments
from sftplay.places import ROOT
from sftplay.plan.flops import ModelFlops, model_flops
from sftplay.train.checkpointing import MarkComplete, accept_numbered_cpus, choose_checkpoint
from sftplay.train.exact_batch import ADVICE, GradientSync, Replay, StepSetup
from sftplay.train.guards import (
    StopInTime,
    StopOnBadStep,
    StopOnSignal,
    StopWithoutProgress,
    WarnOfFullDisk,
    find_deadline,
)
from sftplay.train.metrics import CostModel, LineBoard, MetricsWriter, Observer, TrackPhases
from sftplay.train.micro_batches import MicroBatcher
from sftplay.train.preflight import GroupTimeout, Preflight
from sftplay.train.task import RowOrder, Rows, TrainerParts
from sftplay.units import format_bytes, format_count


@dataclass(frozen=True, kw_only=True)
class RunSetup:
    """One attempt at a run on one rank. `cfg` is the resolved config: no value of it is `auto`."""

    cfg: RunConfig
    folder: RunFolder
    world_size: int
    steps_per_epoch: int
    steps: int
    order: Sequence[int]  # rows of the whole run in training order: exactly steps x effective batch
    order_hash: str

    @property
    def is_sharded(self) -> bool:
        """True where accelerate leaves ranks parts of the weights or of the optimizer's state."""
        return self.world_size > 1 and self.cfg.accelerate_shards

    @property
    def config_sha256(self) -> str:
        """Digest of the resolved config file, which every rank reads."""
        return hashlib.sha256(self.folder.resolved.read_bytes()).hexdigest()

    def micro_batcher(self) -> MicroBatcher | None:
        """Return what cuts the trainer's windows into micro-batches; None where the Trainer accumulates them."""
        if self.is_sharded:
            return None
        rows, length = int(self.cfg.train.batch_size), self.cfg.row_tokens
        budget = rows * length if self.cfg.train.batching == "tokens" else None
        return MicroBatcher(rows, self.cfg.packs_rows, length, budget)

    def arguments(self, *, has_held_out: bool) -> dict[str, Any]:
        """Return arguments for a TRL config: every one that the kit decides, then the user's `train.extra`."""
        cfg, train = self.cfg, self.cfg.train
        os.environ["TENSORBOARD_LOGGING_DIR"] = str(self.folder.path / "tb")
        # A whole window at a time, which the kit cuts; or micro-batches, which the Trainer accumulates.
        rows, micro_batches = train.effective_batch_size // self.world_size, 1
        if self.is_sharded:
            rows, micro_batches = int(train.batch_size), int(train.grad_accum)
        # Otherwise FSDP keeps the whole gradient, in 16 bits, until the last micro-batch; the plan counts a shard.
        is_fsdp = self.is_sharded and cfg.cluster.strategy in ("fsdp", "hsdp")
        sums = {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}} if is_fsdp else {}
        return {
            "output_dir": str(self.folder.checkpoints),
            "run_name": self.folder.name,
            "per_device_train_batch_size": rows,
            "gradient_accumulation_steps": micro_batches,
            "per_device_eval_batch_size": train.batch_size,
            "num_train_epochs": 1,
            "max_steps": self.steps,
            "train_sampling_strategy": "sequential",
            "remove_unused_columns": False,
            "average_tokens_across_devices": True,
            "learning_rate": train.peak_rate,
            **self._schedule(),
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
            **sums,
            **self._device_arguments(),
            **self._intervals(has_held_out),
            **as_named_here(train.extra),
        }

    def _schedule(self) -> dict[str, Any]:
        train = self.cfg.train
        warmup_steps = math.ceil(train.warmup_ratio * self.steps)
        name, given = str(train.lr_scheduler), {}
        if name == "warmup_stable_decay":
            decay_steps = min(math.ceil(train.decay_ratio * self.steps), self.steps - warmup_steps)
            given = {"num_decay_steps": decay_steps, "decay_type": "1-sqrt", "min_lr_ratio": train.min_lr_ratio}
        elif train.min_lr_ratio:
            name, given = "cosine_with_min_lr", {"min_lr_rate": train.min_lr_ratio}
        schedule = {"lr_scheduler_type": name, "warmup_steps": warmup_steps}
        return schedule | ({"lr_scheduler_kwargs": given} if given else {})

    def _device_arguments(self) -> dict[str, Any]:
        train, cpu, comm = self.cfg.train, not torch.cuda.is_available(), self.cfg.cluster.comm
        several = self.world_size > 1
        return {
            "bf16": train.precision == "bf16",
            "fp16": train.precision == "fp16",
            "use_cpu": cpu and not self.is_sharded,  # otherwise accelerate silently drops DeepSpeed and FSDP
            "ddp_backend": "gloo" if cpu and several else None,
            "ddp_find_unused_parameters": False if several else None,
            # Buffers are sent before a forward pass: a rank would wait there for one that has failed.
            "ddp_broadcast_buffers": False if several else None,
            "ddp_bucket_cap_mb": comm.bucket_cap_mb if several else None,
            "ddp_static_graph": comm.static_graph if several else None,
            "ddp_timeout": self.cfg.cluster.timeout,
            **recomputation_arguments(recomputes=train.gradient_checkpointing),
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
            "save_total_limit": None,  # MarkComplete does it: the Trainer removes before the new one is safe
            "load_best_model_at_end": seeks_best,
            "metric_for_best_model": "loss" if seeks_best else None,
            "greater_is_better": False if seeks_best else None,
        }


def refuse_missing_gpu() -> None:
    """Raise MachineError where the parent has planned for a GPU that torch cannot use here."""
    if EXPECTS_GPU in os.environ and not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "not built for CUDA"
        what = f"the run is planned for a GPU, and torch {torch.__version__} ({built}) can use none"
        raise MachineError(
            what, where="torch", fix="`make doctor` says why; on the CPU: export CUDA_VISIBLE_DEVICES=-1"
        )


def make_setup(cfg: RunConfig, folder: RunFolder, *, n_rows: int, known: RowOrder | None = None) -> RunSetup:
    """Return the set-up of a run over `n_rows` rows, or over rows that the task has put in order."""
    train, batch = cfg.train, cfg.train.effective_batch_size
    order: Sequence[int]
    if known is not None:
        steps, steps_per_epoch = known.steps, min(known.steps, known.steps_per_epoch)
        order, digest = range(steps * batch), known.digest
    else:
        steps = train.max_steps or steps_for(n_rows, train.epochs, effective_batch=batch)
        steps_per_epoch = max(1, math.ceil(n_rows / batch))
        order = training_order(n_rows, steps * batch, seed=cfg.seed)
        digest = order_hash(order)
    return RunSetup(
        cfg=cfg,
        folder=folder,
        world_size=log.world_size(),
        steps_per_epoch=steps_per_epoch,
        steps=steps,
        order=order,
        order_hash=digest,
    )


def describe_capacity(trainable: int, learned_tokens: int) -> str:
    """Compare the parameters of the adapter with the tokens it shall learn, and say what follows."""
    if not learned_tokens:
        return ""
    share = f"{format_count(trainable)} parameters for {format_count(learned_tokens)} learned tokens"
    share += f", {trainable / learned_tokens:.3g} a token"
    # A weight holds at most 2 bits of facts (Allen-Zhu and Li, "Physics of Language Models: Part 3.3", 2024); about
    # 1 bit of a token is what a pretrained model has yet to learn (Schulman et al., "LoRA Without Regret", 2025).
    if 2 * trainable >= learned_tokens:
        return f"adapter: {share}: it can hold them"
    return f"warning: the adapter has {share}: too few to hold them all; a larger tuning.lora.r holds more"


def describe_rate(cfg: RunConfig, plan: dict[str, Any]) -> str:
    """Describe the peak rate and say why it is this one."""
    reasons = [found["reason"] for found in plan.get("decisions", []) if found.get("key") == "train.learning_rate"]
    origin = cfg.origins.get("train.learning_rate")
    why = reasons[0] if reasons else f"set by {origin}" if origin else "as given"
    return f"learning rate: {cfg.train.peak_rate:.4g} at its peak, {cfg.train.lr_scheduler} after it ({why})"


@dataclass(frozen=True)
class TrainResult:
    """The end of training: at which step, after how much wall and CPU time, by which signal (0 for none)."""

    step: int
    train_seconds: float
    train_cpu_seconds: float
    stop_signal: int


class TrainRun:
    """Chooses the checkpoint, builds the callbacks, and trains `model`.

    By `fingerprint` a resume names what has changed. Raise ConfigError, DataError or RunError where the checkpoint to
    resume from belongs to another run.
    """

    def __init__(self, setup: RunSetup, model: Any, *, stop: StopOnSignal, fingerprint: dict[str, Any]) -> None:
        self.setup, self.cfg, self.folder, self.stop, self.model = setup, setup.cfg, setup.folder, stop, model
        facts = fingerprint | {
            "order_hash": setup.order_hash,
            "config_sha256": setup.config_sha256,
            "world_size": setup.world_size,
        }
        self.checkpoint = choose_checkpoint(self.cfg, self.folder, facts=facts)
        self.from_step = read_step(self.checkpoint) if self.checkpoint else 0
        attempts = [*self.folder.read_json("status.json").get("attempts", [])]
        devices = self.folder.read_json("plan.json").get("devices", ())
        gpus = count_gpus(self.cfg, world_size=setup.world_size, has_gpu=torch.cuda.is_available(), devices=devices)
        attempts.append(new_attempt(self.cfg, self.folder, from_step=self.from_step, gpus=gpus))
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
            rows=f"{fingerprint['rows_sha256']} {setup.order_hash}",
            base=" ".join(sorted(fingerprint["weights"].values())),
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
        started_s = psutil.Process().create_time() if train.time_limit is not None else 0.0
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
        """Train from the chosen checkpoint or from the start. Raise OutOfMemory where memory does not suffice, RunError
        where a step is not finite, the preflight found a wrong launch, or the best checkpoint is missing.
        """
        self.attach(trainer)
        for callback in trainer.callback_handler.callbacks:
            if log.is_main() and isinstance(callback, TensorBoardCallback):
                from torch.utils.tensorboard import SummaryWriter

                # TensorBoard then hides what an earlier attempt wrote after the checkpoint.
                purge_step = self.from_step + 1 if self.from_step else None
                callback.tb_writer = LineBoard(SummaryWriter(str(self.folder.path / "tb"), purge_step=purge_step))
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


def write_manifest(setup: RunSetup, rows: Rows, *, parameters: dict[str, Any], task: dict[str, Any]) -> None:
    """Record versions, machine, code, data, template, seed, sizing and what trains; `task` adds what only it knows."""
    model = setup.cfg.model
    setup.folder.write_json(
        "manifest.json",
        {
            "kit": __version__,
            "git_commit": git_commit(),
            "machine": probe().as_dict(),
            "python": sys.version.split()[0],
            "seed": setup.cfg.seed,
            "origins": setup.cfg.origins,
            "template_sha256": rows.recipe.get("template_sha256"),
            "mask_method": rows.recipe.get("mask_method"),
            "data": rows.report["sources"],
            "data_files": rows.report["files"],
            "order_sha256": setup.order_hash,
            "steps": setup.steps,
            "model": parameters,
            "base_commit": find_commit(model.name, model.revision) if model.adapter is None else None,
            **task,
            "sizing": setup.folder.read_json("plan.json"),
        },
    )


def git_commit() -> str | None:
    """Return the commit of the kit's checkout, None outside one."""
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


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
    """Return `rows` with rows without a label added at the end: accelerate would fill the last batches with rows from
    the beginning, whose loss would count twice.
    """
    if len(rows) % multiple == 0:
        return rows
    padding = {**rows[0], "labels": [IGNORE_INDEX] * len(rows[0]["labels"])}
    return concatenate_datasets([rows, Dataset.from_list([padding] * (-len(rows) % multiple), features=rows.features)])
