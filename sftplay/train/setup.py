"""The set-up of a run before its trainer is built: steps, order of the rows, arguments of the library."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sftplay import log
from sftplay.config.run import RunConfig
from sftplay.data.order import order_hash, steps_for, training_order
from sftplay.errors import MachineError
from sftplay.launch.run_folder import EXPECTS_GPU, RunFolder
from sftplay.model.recomputation import as_named_here, recomputation_arguments
from sftplay.train.micro_batches import MicroBatcher
from sftplay.train.task import RowOrder
from sftplay.units import format_count


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
