"""What each launcher is told, so that it starts so many workers and nothing else: torchrun, accelerate, deepspeed.

It starts nothing. Options are those of torch 2.13, accelerate 1.15 (`commands/launch.py`) and DeepSpeed 0.19
(`launcher/runner.py`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sftplay.config.schema.cluster import Launcher
from sftplay.errors import ConfigError

KEY = "cluster.launcher"
DEEPSPEED = "sftplay.launch.command.deepspeed_runner"

_ACCELERATE_CONFIG = """\
# For accelerate launch, which would else read the config in its own cache; the command's options go before it.
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
num_processes: {processes}
num_machines: {nodes}
mixed_precision: "{precision}"
use_cpu: false
"""
"""With MULTI_CPU, or use_cpu: true, accelerate starts a single process and says nothing. Under MULTI_GPU it starts as
many as it is asked for and does not look for GPUs; which device they use is the workers' affair."""


@dataclass(frozen=True)
class Scale:
    """How many processes on how many nodes, where they meet, and what the user tells their launcher."""

    nproc: int = 1
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 29511
    launcher_args: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        return self.nproc * self.nnodes


def launcher_words(
    launcher: Launcher, scale: Scale, *, strategy: Mapping[str, str], config: str, gpus: str | None = None
) -> list[str]:
    """The command before the workers' module, the user's own words for the launcher at its end.

    `strategy` is the workers' environment for their strategy, `config` the path at which `accelerate_config` will lie,
    `gpus` the CUDA_VISIBLE_DEVICES of a machine with GPUs.

    Raises:
        ConfigError: the launcher cannot start such a run.
    """
    if launcher == "accelerate":
        words = _accelerate(scale, precision_of(strategy), config=config)
    elif launcher == "deepspeed":
        words = _deepspeed(scale, strategy, gpus=gpus)
    else:
        words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(scale.nproc)]
        words += ["--nnodes", str(scale.nnodes), "--node-rank", str(scale.node_rank)]
        words += ["--master-addr", scale.master_addr, "--master-port", str(scale.master_port)]
    module = "--module" if launcher in ("accelerate", "deepspeed") else "-m"
    return [*words, *scale.launcher_args, module]


def accelerate_config(scale: Scale, strategy: Mapping[str, str]) -> str:
    """The file that keeps accelerate from the one its user once made for other purposes."""
    precision = precision_of(strategy)
    return _ACCELERATE_CONFIG.format(processes=scale.world_size, nodes=scale.nnodes, precision=precision)


def precision_of(strategy: Mapping[str, str]) -> str:
    """What the workers' ACCELERATE_MIXED_PRECISION is to be; accelerate's launcher overwrites it.

    Plain data parallelism sets none: there the Trainer's own arguments say it, and "no" is as good as nothing.
    """
    return strategy.get("ACCELERATE_MIXED_PRECISION", "no")


def _accelerate(scale: Scale, precision: str, *, config: str) -> list[str]:
    # With --use_deepspeed or --use_fsdp it would write its own options over the environment of the strategy.
    words = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config, "--multi_gpu"]
    words += ["--num_processes", str(scale.world_size), "--num_machines", str(scale.nnodes)]
    words += ["--machine_rank", str(scale.node_rank), "--main_process_ip", scale.master_addr]
    words += ["--main_process_port", str(scale.master_port)]
    return [*words, "--mixed_precision", precision, "--dynamo_backend", "no"]


def _deepspeed(scale: Scale, strategy: Mapping[str, str], *, gpus: str | None) -> list[str]:
    if "ACCELERATE_USE_DEEPSPEED" not in strategy:
        fix = f"write cluster.strategy: zero1, zero2 or zero3; or {KEY}: auto"
        raise ConfigError("deepspeed starts runs of zero1, zero2 and zero3 only", where=KEY, fix=fix)
    if scale.nnodes > 1:
        what = f"deepspeed reaches {scale.nnodes} nodes by ssh, and no signal or end of this command would reach them"
        raise ConfigError(what, where=KEY, fix=f"write {KEY}: torchrun, and start it on every node")
    # A list of hosts that lies on this machine (/job/hostfile) would send the run elsewhere.
    words = [sys.executable, "-m", DEEPSPEED, "--hostfile", os.devnull, *_devices(scale.nproc, gpus)]
    words += ["--master_addr", scale.master_addr, "--master_port", str(scale.master_port)]
    return [*words, "--no_local_rank"]


def _devices(nproc: int, gpus: str | None) -> Sequence[str]:
    """Which devices to start a rank for; with a mere number DeepSpeed takes the machine's first ones."""
    if not gpus:
        return "--num_gpus", str(nproc)
    chosen = [each.strip() for each in gpus.split(",")][:nproc]
    if not all(each.isdecimal() for each in chosen):
        fix = f"give their numbers (nvidia-smi -L), or write {KEY}: torchrun"
        raise ConfigError(f"deepspeed takes GPUs by number, not {gpus}", where="CUDA_VISIBLE_DEVICES", fix=fix)
    return "--include", f"localhost:{','.join(chosen)}"
