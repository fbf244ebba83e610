"""Build the command and environment of a run's workers, for each launcher. It starts nothing."""

from __future__ import annotations

import os
import shlex
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from sftplay.config.cluster import Launcher
from sftplay.errors import ConfigError, MachineError
from sftplay.launch.run_folder import EXPECTS_GPU
from sftplay.log import FOLLOWED
from sftplay.machine.gpu import Gpu, usable_cores, visible_cores
from sftplay.places import cache_root
from sftplay.units import parse_seconds

DRIVER = "sftplay.launch.ray_train.driver"
KEY = "cluster.launcher"
ADDRESS = "RAY_ADDRESS"
"""Ray's own variable: the cluster to run on. Without it the driver starts a cluster on this machine."""


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        fix = "write --placement SPREAD --resources CPU=4 --start-timeout 600 behind `--`; see docs/ray.md"
        raise ConfigError(message, where="the options for ray", fix=fix)


def read_request(words: Sequence[str]) -> Namespace:
    """The command as `workers`, `gpu`, `placement`, `resources`, `start_timeout`, `worker`, or ConfigError."""
    parser = _Parser(prog="ray", add_help=False, allow_abbrev=False)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--placement", choices=("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"), default="PACK")
    parser.add_argument("--resources", type=_resources, default={})
    parser.add_argument("--start-timeout", type=_seconds, default=300.0)
    parser.add_argument("-m", dest="worker", nargs=2, metavar=("MODULE", "RUN"))
    return parser.parse_args(words)


def ray_command(workers: int, options: Sequence[str], *, has_gpu: bool, environ: Mapping[str, str]) -> list[str]:
    """The driver's command for so many workers, with the user's `options`. Raises ConfigError, MachineError."""
    tasks = int(environ.get("SLURM_STEP_NUM_TASKS", "1"))
    if tasks > 1 or ("SLURM_JOB_ID" in environ and ADDRESS not in environ):
        what = f"this is part of the SLURM job {environ.get('SLURM_JOB_ID', '')}, which places processes itself"
        fix = f"use `make submit` without ray; or start Ray in the job, set {ADDRESS}, and call this once"
        raise ConfigError(what, where=KEY, fix=fix)
    if find_spec("ray") is None:
        raise MachineError("the package ray is not installed", where=KEY, fix="make install EXTRAS=ray")
    words = ["--workers", str(workers), *(["--gpu"] if has_gpu else []), *options]
    custom = set(read_request(words).resources) - {"CPU"}
    if custom and ADDRESS not in environ:
        what = f"a cluster on this machine has no {', '.join(sorted(custom))}"
        raise ConfigError(what, where="--resources", fix=f"set {ADDRESS} to a cluster that has it, or leave it out")
    return [sys.executable, "-m", DRIVER, *words]


def _resources(text: str) -> dict[str, float]:
    amounts = {}
    for part in text.split(","):
        name, _, amount = part.partition("=")
        try:
            amounts[name.strip()] = float(amount)
        except ValueError:
            raise ArgumentTypeError(f"{part!r} is not NAME=NUMBER") from None
    if "GPU" in amounts:
        raise ArgumentTypeError("each worker has one whole GPU: two ranks of NCCL cannot share one")
    return amounts


def _seconds(text: str) -> float:
    try:
        return parse_seconds(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


DEEPSPEED = "sftplay.launch.deepspeed_runner"

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
    python: str = sys.executable,
) -> list[str]:
    """The command up to the workers' module. The user's options for the launcher come last.

    `strategy` is the workers' environment for their strategy, `config` the path of `accelerate_config`'s text, `gpus`
    the CUDA_VISIBLE_DEVICES of a machine with GPUs, `python` the workers'; Ray's driver chooses it
    itself. Raises ConfigError if the launcher cannot start such a run; MachineError if it is not installed.
    """
    if launcher == "ray":
        if scale.nnodes > 1:
            fix = "leave NNODES out: WORKERS= is the number of all processes, and Ray knows the nodes"
            raise ConfigError("ray places the processes on its nodes itself", where=KEY, fix=fix)
        return [*ray_command(scale.nproc, scale.launcher_args, has_gpu=has_gpu, environ=os.environ), "-m"]
    if launcher == "accelerate":
        # With --use_deepspeed or --use_fsdp accelerate would overwrite the environment of the strategy.
        argv = [python, "-m", "accelerate.commands.launch", "--config_file", config, "--multi_gpu"]
        argv += ["--num_processes", str(scale.world_size), "--num_machines", str(scale.nnodes)]
        argv += ["--machine_rank", str(scale.node_rank), "--main_process_ip", scale.master_addr]
        argv += ["--main_process_port", str(scale.master_port)]
        argv += ["--mixed_precision", strategy.get(PRECISION, "no"), "--dynamo_backend", "no"]
    elif launcher == "deepspeed":
        if "ACCELERATE_USE_DEEPSPEED" not in strategy:
            fix = f"write cluster.strategy: zero1, zero2 or zero3; or {KEY}: auto"
            raise ConfigError("deepspeed starts runs of zero1, zero2 and zero3 only", where=KEY, fix=fix)
        if scale.nnodes > 1:
            what = (
                f"deepspeed reaches {scale.nnodes} nodes by ssh, and stop signals to this command would not reach them"
            )
            raise ConfigError(what, where=KEY, fix=f"write {KEY}: torchrun, and start it on every node")
        devices = ["--num_gpus", str(scale.nproc)]
        if gpus:  # with only a number DeepSpeed takes the machine's first devices
            chosen = [gpu.strip() for gpu in gpus.split(",")][: scale.nproc]
            if not all(gpu.isdecimal() for gpu in chosen):
                fix = f"give their numbers (nvidia-smi -L), or write {KEY}: torchrun"
                raise ConfigError(f"deepspeed takes GPUs by number, not {gpus}", where="CUDA_VISIBLE_DEVICES", fix=fix)
            devices = ["--include", f"localhost:{','.join(chosen)}"]
        # A list of hosts on this machine (/job/hostfile) would start the run on other machines.
        argv = [python, "-m", DEEPSPEED, "--hostfile", os.devnull, *devices]
        argv += ["--master_addr", scale.master_addr, "--master_port", str(scale.master_port), "--no_local_rank"]
    else:
        argv = [python, "-m", "torch.distributed.run", "--nproc-per-node", str(scale.nproc)]
        argv += ["--nnodes", str(scale.nnodes), "--node-rank", str(scale.node_rank)]
        argv += ["--master-addr", scale.master_addr, "--master-port", str(scale.master_port)]
    module = "--module" if launcher in ("accelerate", "deepspeed") else "-m"
    return [*argv, *scale.launcher_args, module]


def accelerate_config(scale: Scale, strategy: Mapping[str, str]) -> str:
    """The text of accelerate's config file. Without one, accelerate reads a file that the user made for other runs."""
    precision = strategy.get(PRECISION, "no")
    return _ACCELERATE_CONFIG.format(processes=scale.world_size, nodes=scale.nnodes, precision=precision)


WORKER = "sftplay.tasks.worker"

LARGE_BYTES = 4 * 2**20
"""Tensors of at least this size get pages of their own on a CPU. The size is two huge pages: with one huge page, runs
took up to a tenth longer."""


@dataclass(frozen=True)
class Launch:
    """A command that can be started: argv, and the variables added to the parent's environment."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    files: Mapping[str, str] = field(default_factory=dict)
    """Path -> text of the files that must be written before the start."""

    def as_text(self) -> str:
        """The command as a user would type it in a shell."""
        settings = " ".join(f"{key}={shlex.quote(value)}" for key, value in sorted(self.env.items()))
        return f"{settings} {shlex.join(self.argv)}".strip()


def build_launch(
    run_folder: Path,
    scale: Scale,
    *,
    has_gpu: bool,
    is_offline: bool,
    strategy: Mapping[str, str] | None = None,
    launcher: Launcher = "auto",
    module: str = WORKER,
    options: Sequence[str] = (),
    python: str = sys.executable,
) -> Launch:
    """`module` with the folder and `options`, started by itself for one process and by `launcher` for several.

    `is_offline`: the run needs nothing from a hub.

    `strategy` comes from `strategy_environment`; without it the processes run plain data parallelism. Raises
    ConfigError if the launcher cannot start such a run, or there are options for a launcher but none runs.
    """
    env = quiet_environment() | cache_environment() | {FOLLOWED: "1"}
    if is_offline:
        env |= offline_environment()
    env |= {EXPECTS_GPU: "1", **gpu_environment()} if has_gpu else allocator_environment()
    cores, is_one = usable_cores(), scale.world_size == 1
    if "OMP_NUM_THREADS" not in os.environ and (cores < visible_cores() if is_one else not has_gpu):
        env["OMP_NUM_THREADS"] = str(max(1, cores // scale.nproc))
    started = (module, str(run_folder), *options)
    if is_one:
        if scale.launcher_args:
            what = f"the run has one process and no launcher that could take {shlex.join(scale.launcher_args)}"
            raise ConfigError(what, where="--", fix="ask for several processes (NPROC=2), or leave them out")
        return Launch((python, "-m", *started), env)
    if not has_gpu and not strategy:
        # Without it each rank trains alone as the main one, and all exit with 0.
        env["ACCELERATE_USE_CPU"] = "true"
    env |= strategy or {}
    # Otherwise the agent's store keeps dead addresses after a restart (torch 2.13, gloo).
    env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    config = str(run_folder / "accelerate.yaml")
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES") if has_gpu else None
    argv = launcher_command(
        launcher, scale, strategy=strategy or {}, config=config, has_gpu=has_gpu, gpus=gpus, python=python
    )
    files = {config: accelerate_config(scale, strategy or {})} if launcher == "accelerate" else {}
    return Launch((*argv, *started), env, files)


def quiet_environment() -> dict[str, str]:
    """Switches off telemetry, advice and progress bars of libraries."""
    switches = (
        "HF_HUB_DISABLE_TELEMETRY", "DO_NOT_TRACK", "ACCELERATE_DISABLE_RICH", "TRANSFORMERS_NO_ADVISORY_WARNINGS",
        "HF_DATASETS_DISABLE_PROGRESS_BARS", "TRL_EXPERIMENTAL_SILENCE", "BITSANDBYTES_NOWELCOME", "PYTHONUNBUFFERED",
    )  # fmt: skip
    return {**dict.fromkeys(switches, "1"), "TF_CPP_MIN_LOG_LEVEL": "3"}


def offline_environment() -> dict[str, str]:
    """Keeps libraries from any connection: everything is on this machine."""
    return {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # nothing is downloaded; the remaining bars count files read or written
    }


def gpu_environment() -> dict[str, str]:
    """Numbers GPUs as nvidia-smi does; the allocator extends blocks, for fewer gaps. The user's settings stay."""
    settings = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    return {key: value for key, value in settings.items() if key not in os.environ}


def one_gpu_environment(gpus: Sequence[Gpu], *, by_uuid: bool = True) -> dict[str, str]:
    """Leaves a single process the first of `gpus`, which are visible now. Empty where one whole GPU is visible.

    transformers counts every visible GPU (5.18, training_args.py, `_setup_devices`), and TRL then refuses to train:
    nn.DataParallel would copy the model. torch counts a GPU's MIG instances by their GPUs (2.13, cuda/__init__.py,
    `_device_count_nvml`) until one is named. vLLM reads the variable's first word as a number: it takes the user's own.
    """
    if len(gpus) < 2 and not any(gpu.is_mig for gpu in gpus):
        return {}
    first = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0").split(",")[0].strip()
    return {"CUDA_VISIBLE_DEVICES": (gpus[0].uuid if by_uuid else "") or first}


def allocator_environment() -> dict[str, str]:
    """Returns a large tensor's memory to the system when the tensor is freed. The user's own settings stay.

    By default glibc soon keeps blocks of up to 32 MiB in its heap. There an aligned request does not fit the gap of an
    earlier one of the same size (glibc 2.36, `_int_memalign`), and activations take up to twice their bytes. Returning
    memory costs time; huge pages (torch, `THP_MEM_ALLOC_ENABLE`) save as much. Smaller tensors stay in the heap. glibc
    lets its end grow to twice the threshold before it returns memory, but to 128 KiB once the threshold is set.
    """
    settings = {"MALLOC_MMAP_THRESHOLD_": str(LARGE_BYTES), "MALLOC_TRIM_THRESHOLD_": str(2 * LARGE_BYTES)}
    settings["THP_MEM_ALLOC_ENABLE"] = "1"
    return {key: value for key, value in settings.items() if key not in os.environ}


def cache_environment() -> dict[str, str]:
    """Puts caches below .cache/ if the home folder cannot be written. The user's own settings stay."""
    if os.access(os.path.expanduser("~"), os.W_OK):  # noqa: PTH111 - Path.home() fails where no home is known
        return {}
    folders = {"HF_HOME": "huggingface", "XDG_CACHE_HOME": "xdg", "TORCH_HOME": "torch"}
    return {key: str(cache_root().resolve() / name) for key, name in folders.items() if key not in os.environ}
