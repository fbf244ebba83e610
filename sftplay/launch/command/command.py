"""Builds the command and environment of a run's workers. It starts nothing."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sftplay.config.cluster import Launcher
from sftplay.errors import ConfigError
from sftplay.launch.command.launchers import Scale as Scale
from sftplay.launch.command.launchers import accelerate_config, launcher_command
from sftplay.launch.variables import EXPECTS_GPU
from sftplay.log import FOLLOWED
from sftplay.machine.gpu import Gpu
from sftplay.places import cache_root

WORKER = "sftplay.tasks.worker"

ACCELERATE_CONFIG = "accelerate.yaml"  # name of accelerate's config file in the run folder
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
) -> Launch:
    """The worker itself for one process, `launcher` for several. `is_offline`: the run needs nothing from a hub.

    `strategy` comes from `strategy_environment`; without it the processes run plain data parallelism. Raises
    ConfigError if the launcher cannot start such a run, or there are options for a launcher but none runs.
    """
    env = quiet_environment() | cache_environment() | {FOLLOWED: "1"}
    if is_offline:
        env |= offline_environment()
    env |= {EXPECTS_GPU: "1", **gpu_environment()} if has_gpu else allocator_environment()
    if scale.world_size == 1:
        if scale.launcher_args:
            what = f"the run has one process and no launcher that could take {shlex.join(scale.launcher_args)}"
            raise ConfigError(what, where="--", fix="ask for several processes (NPROC=2), or leave them out")
        return Launch((sys.executable, "-m", WORKER, str(run_folder)), env)
    if not has_gpu:
        if not strategy:
            # Without it each rank trains alone as the main one, and all exit with 0.
            env["ACCELERATE_USE_CPU"] = "true"
        if "OMP_NUM_THREADS" not in os.environ:
            from sftplay.machine.probe import usable_cores

            env["OMP_NUM_THREADS"] = str(max(1, usable_cores() // scale.nproc))
    env |= strategy or {}
    # Otherwise the agent's store keeps dead addresses after a restart (torch 2.13, gloo).
    env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    config = str(run_folder / ACCELERATE_CONFIG)
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES") if has_gpu else None
    argv = launcher_command(launcher, scale, strategy=strategy or {}, config=config, has_gpu=has_gpu, gpus=gpus)
    files = {config: accelerate_config(scale, strategy or {})} if launcher == "accelerate" else {}
    return Launch((*argv, WORKER, str(run_folder)), env, files)


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
