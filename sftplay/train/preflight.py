"""Checks on every rank before the first step that the launch is what the plan says, and how ranks wait."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import distributed_c10d
from transformers import TrainerCallback

from sftplay import log
from sftplay.config.run import RunConfig
from sftplay.errors import RunError
from sftplay.launch.run_folder import PARENT, RunFolder
from sftplay.model.out_of_memory import gather_objects
from sftplay.train.metrics import Observer

POLL_S = 0.1  # pause between two checks for a file


@contextmanager
def first_of_node(folder: RunFolder) -> Iterator[bool]:
    """Let the first rank of each node go through the body before the others; True where others wait for this one.

    When the body fails, the others stay outside and their launcher ends them, so the error is printed once.
    """
    is_first, marker = log.local_rank() == 0, marker_path(folder.logs)
    if is_first:
        (folder.logs / f".ready-{log.rank()}").unlink(missing_ok=True)
    if log.world_size() == 1:
        yield False
        return
    if is_first:
        marker.unlink(missing_ok=True)
    else:
        while not marker.exists():
            time.sleep(POLL_S)
    yield is_first
    if is_first:
        marker.touch()


def marker_path(logs: Path) -> Path:
    """Return the file by which the first rank of this node says that it is through, in this launch: nodes share the
    folder, and another start, with another parent, must not find it.
    """
    return logs / f".prepared-{log.rank() - log.local_rank()}-{os.environ.get(PARENT) or os.getppid()}"


def wait_for_nodes(folder: RunFolder) -> None:
    """Wait without a limit until the ranks of every node have come here. What follows, the rendezvous, has a limit.
    Raise SystemExit with the run's exit code where a rank has ended before; that rank has said why.
    """
    here = log.local_ranks()
    if len(here) == log.world_size():
        return
    for first in range(0, log.world_size(), len(here)):
        marker = folder.logs / f".ready-{first}"
        if log.rank() == first:
            marker.touch()
        wait_for_main(marker, folder)


def wait_for_main(path: Path, folder: RunFolder) -> None:
    """Wait until the main rank, or another one, has written `path`. Raise SystemExit with the run's exit code where a
    rank has ended before; that rank has said why.
    """
    while not path.exists():
        time.sleep(POLL_S)
        code = folder.read_json("status.json").get("exit_code")
        if code is not None:  # on another node, whose launcher ends only its own
            raise SystemExit(code)


class GroupTimeout(TrainerCallback):
    """Sets the time limit of every process group once there is one, and removes the node's marker.

    The Trainer's `ddp_timeout` does not reach groups on CPUs, nor the further groups of DeepSpeed and FSDP.
    """

    def __init__(self, timeout_s: int, logs: Path) -> None:
        self.timeout_s, self.logs = timeout_s, logs

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not torch.distributed.is_initialized():
            return
        for group in list(distributed_c10d._world.pg_map):  # torch 2.13 has no public list of groups
            distributed_c10d._set_pg_timeout(timedelta(seconds=self.timeout_s), group)
        if log.local_rank() == 0:
            marker_path(self.logs).unlink(missing_ok=True)


LAUNCHES = {
    "ddp": ("DistributedDataParallel", "MULTI_"),
    "zero": ("DeepSpeedEngine", "DEEPSPEED"),
    "fsdp": ("FSDP", "FSDP"),
    "hsdp": ("FSDP", "FSDP"),
}
"""Beginning of cluster.strategy -> beginnings of the class in which the trainer must have wrapped the model, and of the
distributed type that accelerate must report."""

MUST_AGREE = {
    "fingerprint": "read different configs",
    "parameters": "start from different weights",
    "base": "start from different files of weights",
    "rows": "train on different rows",
}
"""Facts that must be equal on all ranks, and the message where they are not."""

CHUNK_NUMBERS = 2**22
"""Weights that are summed at a time: a copy in 8 bytes takes 32 MiB, and one of 152,000 x 8192 weights 10 GB."""


class Preflight(Observer):
    """Compares plan and reality when everything is built, and writes to status.json what each rank is.

    `rows` and `base` are digests of the rows in their order, and of the files of weights.
    """

    def __init__(self, cfg: RunConfig, folder: RunFolder, *, rows: str, base: str) -> None:
        self.cfg, self.folder, self.rows, self.base = cfg, folder, rows, base
        self.parameters = ""
        """`checksum` of the model as it was loaded: FSDP and ZeRO-3 shard it later. Empty on a single process."""

    def attach(self, trainer: Any) -> None:
        super().attach(trainer)
        if log.world_size() > 1:
            self.parameters = checksum(trainer.model)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer, accelerator = self.trainer, self.trainer.accelerator
        ranks = gather_objects(
            {
                "pid": os.getpid(),
                "distributed_type": str(accelerator.distributed_type.value),
                "world_size": accelerator.num_processes,
                "is_main": accelerator.is_main_process,
                "model_class": type(trainer.model_wrapped).__name__,
                "fingerprint": hashlib.sha256(self.folder.resolved.read_bytes()).hexdigest(),
                "rows_per_step": trainer.args.per_device_train_batch_size * trainer.args.gradient_accumulation_steps,
                "sizes": read_sizes(trainer),
                "parameters": self.parameters,
                "rows": self.rows,
                "base": self.base,
            }
        )
        if log.is_main():
            compared_only = ("parameters", "base", "rows")
            self.folder.update_status(ranks=[{k: v for k, v in r.items() if k not in compared_only} for r in ranks])
        if problems := find_problems(ranks, self.cfg, world_size=log.world_size()):
            fix = "launch with `make train`, which sets all this"
            if self.cfg.cluster.strategy in ("fsdp", "hsdp") and not torch.cuda.is_available():
                fix = "fsdp needs GPUs; a CPU splits a model by cluster.strategy: zero3"
            raise RunError("; ".join(problems), where="preflight", fix=fix)
        planned = self.folder.read_json("plan.json")
        if other_sizes := [
            f"rank {n}: {key} is {value} where plan.json says {planned[key]}"
            for n, rank in enumerate(ranks)
            for key, value in rank["sizes"].items()
            if planned.get(key, value) != value
        ]:
            raise RunError(
                "; ".join(other_sizes),
                where=str(self.folder.path / "plan.json"),
                fix="start it again with `make train`, which plans and launches together",
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 1 and log.is_main():  # nothing before it makes a run of a start
            self.folder.become_latest()


def read_sizes(trainer: Any) -> dict[str, int]:
    """Read micro-batch, accumulation, effective batch, processes and sizes of rollout batches from the trainer."""
    args, processes = trainer.args, trainer.accelerator.num_processes
    # GRPOConfig has them once it is made; other configs of TRL have none.
    of_groups = ("num_generations", "generation_batch_size", "steps_per_generation")
    window_rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
    micro_batch = trainer.micro_batcher.micro_batch if trainer.micro_batcher else args.per_device_train_batch_size
    return {
        "batch_size": micro_batch,
        "grad_accum": -(-window_rows // micro_batch),
        "effective_batch_size": window_rows * processes,
        "world_size": processes,
        **{name: getattr(args, name) for name in of_groups if hasattr(args, name)},
        **({"generation_rows": trainer.generation_rows} if hasattr(trainer, "generation_rows") else {}),
    }


def find_problems(ranks: list[dict[str, Any]], cfg: RunConfig, *, world_size: int) -> list[str]:
    """Return what differs between the ranks, or between the ranks and the plan; empty when nothing does."""
    problems = []
    for n, rank in enumerate(ranks):
        if rank["world_size"] != world_size:
            problems.append(f"rank {n} sees {rank['world_size']} processes instead of {world_size}")
        if world_size == 1:
            continue
        kind = cfg.cluster.strategy.rstrip("123")
        wrapper, launch = LAUNCHES[kind][0], LAUNCHES[kind if cfg.accelerate_shards else "ddp"][1]
        if not rank["model_class"].startswith(wrapper):
            problems.append(f"rank {n} wraps the model in {rank['model_class']} instead of {wrapper}")
        if not rank["distributed_type"].startswith(launch):
            problems.append(f"rank {n} is {rank['distributed_type']} where cluster.strategy is {cfg.cluster.strategy}")
    if (mains := sum(rank["is_main"] for rank in ranks)) != 1:
        problems.append(f"{mains} ranks take themselves for the main one")
    problems += [f"ranks {what}" for key, what in MUST_AGREE.items() if len({rank[key] for rank in ranks}) > 1]
    rows = sum(rank["rows_per_step"] for rank in ranks)
    if rows != cfg.train.effective_batch_size:
        problems.append(f"a step takes {rows} rows instead of {cfg.train.effective_batch_size}")
    return problems


def has_sharded_weights(trainer: Any) -> bool:
    """Return whether each rank holds only a shard of the weights, as under FSDP and ZeRO-3."""
    plugin = trainer.accelerator.state.deepspeed_plugin if trainer.is_deepspeed_enabled else None
    return bool(hasattr(trainer, "whole_weights") or trainer.is_fsdp_enabled or (plugin and plugin.zero_stage == 3))


def checksum(model: Any) -> str:
    """Return a digest of the weights that train; equal on ranks that hold the same, on any GPU or processor.

    It sums bytes as integers, modulo 2^64: a sum of floating-point numbers depends on the order.
    """
    digest, integers = hashlib.sha256(), {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    for parameter in model.parameters():
        if parameter.requires_grad:
            numbers = parameter.detach().flatten().view(integers[parameter.element_size()])
            sums = torch.stack([chunk.sum(dtype=torch.int64) for chunk in numbers.split(CHUNK_NUMBERS)])
            digest.update(sums.cpu().numpy().tobytes())
    return digest.hexdigest()
