"""Builds the command and environment of a run's workers. It starts nothing, so it can be printed and tested."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sftplay.config.schema.cluster import Launcher
from sftplay.errors import ConfigError
from sftplay.launch.command.launchers import Scale as Scale
from sftplay.launch.command.launchers import accelerate_config, launcher_words
from sftplay.log import FOLLOWED
from sftplay.machine.probe import usable_cores

WORKER = "sftplay.tasks.worker"

ACCELERATE_CONFIG = "accelerate.yaml"
"""In the run folder, where accelerate starts the run."""

PARENT = "SFTPLAY_PARENT"
"""Set by the parent for its launch: its own pid, by which a worker sees whether it still belongs to somebody."""

LARGE_BYTES = 4 * 2**20
"""From this size on a tensor on a CPU gets pages of its own. Two huge pages: at one, runs took up to a tenth longer."""


@dataclass(frozen=True)
class Launch:
    """A command ready to start: argv, and what its environment adds to the parent's."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    files: Mapping[str, str] = field(default_factory=dict)
    """Path -> text of what must be written before it starts."""

    def as_text(self) -> str:
        """The command as one could type it."""
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
    """The worker directly for one process, else under `launcher`. `is_offline`: nothing of the run is on a hub.

    `strategy` is what `strategy_environment` says; without it the processes run plain data parallelism.

    Raises:
        ConfigError: the launcher cannot start such a run, or is told something where none runs.
    """
    env = quiet_environment() | cache_environment() | {FOLLOWED: "1"}
    if is_offline:
        env |= offline_environment()
    env |= gpu_environment() if has_gpu else allocator_environment()
    if scale.world_size == 1:
        _refuse_launcher_args(scale)
        return Launch((sys.executable, "-m", WORKER, str(run_folder)), env)
    if not has_gpu:
        if not strategy:
            # Without it both ranks train alone, each believing to be the main one, and exit with 0.
            env["ACCELERATE_USE_CPU"] = "true"
        if "OMP_NUM_THREADS" not in os.environ:
            env["OMP_NUM_THREADS"] = str(max(1, usable_cores() // scale.nproc))
    env |= strategy or {}
    # The agent's store keeps dead addresses over a restart otherwise (torch 2.13, gloo).
    env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    config = str(run_folder / ACCELERATE_CONFIG)
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES") if has_gpu else None
    words = launcher_words(launcher, scale, strategy=strategy or {}, config=config, gpus=gpus)
    files = {config: accelerate_config(scale, strategy or {})} if launcher == "accelerate" else {}
    return Launch((*words, WORKER, str(run_folder)), env, files)


def _refuse_launcher_args(scale: Scale) -> None:
    if scale.launcher_args:
        words = shlex.join(scale.launcher_args)
        fix = "ask for several processes (NPROC=2), or leave it out"
        raise ConfigError(f"no launcher runs that could take {words}: the run has one process", where="--", fix=fix)


def quiet_environment() -> dict[str, str]:
    """No telemetry, no advisory noise, no progress bars of libraries."""
    return {
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "DO_NOT_TRACK": "1",
        "ACCELERATE_DISABLE_RICH": "1",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "BITSANDBYTES_NOWELCOME": "1",
        "PYTHONUNBUFFERED": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }


def offline_environment() -> dict[str, str]:
    """Everything is on this machine: no library attempts a connection."""
    return {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # nothing is downloaded; what is left counts files read or written
    }


def gpu_environment() -> dict[str, str]:
    """GPUs numbered as nvidia-smi does, and an allocator that grows its blocks in place of keeping odd ones.

    Settings the user made are respected.
    """
    usual = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    return {key: value for key, value in usual.items() if key not in os.environ}


def allocator_environment() -> dict[str, str]:
    """A large tensor's memory goes back to the system with it; settings the user made are respected.

    Left to itself, glibc soon keeps blocks of up to 32 MiB in its heap, where an aligned request does not fit the hole
    that one of the same size has left (glibc 2.36, `_int_memalign`): activations then take up to twice their bytes.
    Huge pages (torch, `THP_MEM_ALLOC_ENABLE`) make up for the time that giving back costs.
    """
    wished = {"MALLOC_MMAP_THRESHOLD_": str(LARGE_BYTES), "THP_MEM_ALLOC_ENABLE": "1"}
    return {key: value for key, value in wished.items() if key not in os.environ}


def cache_environment() -> dict[str, str]:
    """Caches below .cache/ when the home folder cannot hold them; settings the user made are respected."""
    home = os.path.expanduser("~")  # noqa: PTH111 - Path.home() fails where no home is known
    settings = {}
    if not os.access(home, os.W_OK):
        root = Path(".cache").resolve()
        for key, folder in (("HF_HOME", "huggingface"), ("XDG_CACHE_HOME", "xdg"), ("TORCH_HOME", "torch")):
            if key not in os.environ:
                settings[key] = str(root / folder)
    return settings
