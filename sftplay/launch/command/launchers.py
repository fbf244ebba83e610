"""The command of each launcher (torchrun, accelerate, deepspeed, ray) that starts the workers. It starts nothing.

Options are those of torch 2.13, accelerate 1.15 (`commands/launch.py`) and DeepSpeed 0.19 (`launcher/runner.py`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from sftplay.config.cluster import Launcher
from sftplay.errors import ConfigError
from sftplay.launch.command.ray_command import ray_command

KEY = "cluster.launcher"
DEEPSPEED = "sftplay.launch.command.deepspeed_runner"

PRECISION = "ACCELERATE_MIXED_PRECISION"
"""The workers' variable, which accelerate's launcher overwrites. Plain data parallelism does not set it: the Trainer's
own arguments decide, and "no" has the same effect as nothing."""

_ACCELERATE_CONFIG = """\
# For accelerate launch, which would otherwise read the config in its own cache. Options of the command override it.
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
num_processes: {processes}
num_machines: {nodes}
mixed_precision: "{precision}"
use_cpu: false
"""
"""With MULTI_CPU or use_cpu: true, accelerate starts a single process without a message. With MULTI_GPU it starts the
requested number and does not look for GPUs; the workers choose their device."""


@dataclass(frozen=True)
class Scale:
    """Number of processes and nodes, the address where they meet, and the user's options for the launcher."""

    nproc: int = 1
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 29511
    launcher_args: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        return self.nproc * self.nnodes


def launcher_command(
    launcher: Launcher,
    scale: Scale,
    *,
    strategy: Mapping[str, str],
    config: str,
    has_gpu: bool = False,
    gpus: str | None = None,
) -> list[str]:
    """The command up to the workers' module. The user's options for the launcher come last.

    `strategy` is the workers' environment for their strategy, `config` the path of `accelerate_config`'s text, `gpus`
    the CUDA_VISIBLE_DEVICES of a machine with GPUs. Raises ConfigError if the launcher cannot start such a run;
    MachineError if it is not installed.
    """
    if launcher == "ray":
        if scale.nnodes > 1:
            fix = "leave NNODES out: WORKERS= is the number of all processes, and Ray knows the nodes"
            raise ConfigError("ray places the processes on its nodes itself", where=KEY, fix=fix)
        return [*ray_command(scale.nproc, scale.launcher_args, has_gpu=has_gpu, environ=os.environ), "-m"]
    if launcher == "accelerate":
        # With --use_deepspeed or --use_fsdp accelerate would overwrite the environment of the strategy.
        argv = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config, "--multi_gpu"]
        argv += ["--num_processes", str(scale.world_size), "--num_machines", str(scale.nnodes)]
        argv += ["--machine_rank", str(scale.node_rank), "--main_process_ip", scale.master_addr]
        argv += ["--main_process_port", str(scale.master_port)]
        argv += ["--mixed_precision", strategy.get(PRECISION, "no"), "--dynamo_backend", "no"]
    elif launcher == "deepspeed":
        argv = _deepspeed_command(scale, strategy, gpus=gpus)
    else:
        argv = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(scale.nproc)]
        argv += ["--nnodes", str(scale.nnodes), "--node-rank", str(scale.node_rank)]
        argv += ["--master-addr", scale.master_addr, "--master-port", str(scale.master_port)]
    module = "--module" if launcher in ("accelerate", "deepspeed") else "-m"
    return [*argv, *scale.launcher_args, module]


def _deepspeed_command(scale: Scale, strategy: Mapping[str, str], *, gpus: str | None) -> list[str]:
    if "ACCELERATE_USE_DEEPSPEED" not in strategy:
        fix = f"write cluster.strategy: zero1, zero2 or zero3; or {KEY}: auto"
        raise ConfigError("deepspeed starts runs of zero1, zero2 and zero3 only", where=KEY, fix=fix)
    if scale.nnodes > 1:
        what = f"deepspeed reaches {scale.nnodes} nodes by ssh, and stop signals to this command would not reach them"
        raise ConfigError(what, where=KEY, fix=f"write {KEY}: torchrun, and start it on every node")
    devices = ["--num_gpus", str(scale.nproc)]
    if gpus:  # with only a number DeepSpeed takes the machine's first devices
        chosen = [gpu.strip() for gpu in gpus.split(",")][: scale.nproc]
        if not all(gpu.isdecimal() for gpu in chosen):
            fix = f"give their numbers (nvidia-smi -L), or write {KEY}: torchrun"
            raise ConfigError(f"deepspeed takes GPUs by number, not {gpus}", where="CUDA_VISIBLE_DEVICES", fix=fix)
        devices = ["--include", f"localhost:{','.join(chosen)}"]
    # A list of hosts on this machine (/job/hostfile) would start the run on other machines.
    argv = [sys.executable, "-m", DEEPSPEED, "--hostfile", os.devnull, *devices]
    return [*argv, "--master_addr", scale.master_addr, "--master_port", str(scale.master_port), "--no_local_rank"]


def accelerate_config(scale: Scale, strategy: Mapping[str, str]) -> str:
    """The text of accelerate's config file. Without one, accelerate reads a file that the user made for other runs."""
    precision = strategy.get(PRECISION, "no")
    return _ACCELERATE_CONFIG.format(processes=scale.world_size, nodes=scale.nnodes, precision=precision)
