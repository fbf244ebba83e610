"""Prepares a run's strategy before the start: ZeRO stage, environment, DeepSpeed file, DeepSpeed's operators."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from sftplay import log
from sftplay.config.cluster import ZERO_STAGES
from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError, MachineError
from sftplay.launch.command.command import Launch, Scale
from sftplay.launch.run_folder import RunFolder

PLAIN = "deepspeed.json"
"""The user's file without comments, in the run folder. accelerate reads no comments."""

OPERATORS = {"ShareMemCommBuilder": "deepspeed_shm_comm", "CPUAdamBuilder": "cpu_adam"}
"""DeepSpeed's builder -> the name of the folder and library that it makes."""

ACCUMULATION = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"


def with_deepspeed(cfg: RunConfig, *, is_asked: bool) -> RunConfig:
    """Return the config with a ZeRO stage instead of `auto`, where DeepSpeed `is_asked` for or its file is named. Raise
    ConfigError where the config names another strategy, or the file cannot be used.
    """
    cluster = cfg.cluster
    if not is_asked and cluster.deepspeed is None:
        return cfg
    if cluster.strategy == "auto":
        from sftplay.launch.command.deepspeed_json import read_deepspeed

        values = read_deepspeed(Path(cluster.deepspeed)) if cluster.deepspeed else {}
        stage = values.get("zero_optimization", {}).get("stage")
        name = next((name for name, number in ZERO_STAGES.items() if number == stage), "zero2")
        return cfg.with_values({"cluster.strategy": name}, cluster.deepspeed or "train-deepspeed")
    if cluster.strategy not in ZERO_STAGES:
        where = f"{cfg.origins.get('cluster.strategy', 'cluster')} cluster.strategy"
        fix = f"write {', '.join(ZERO_STAGES)} or auto, or launch it with train-distributed"
        raise ConfigError(f"DeepSpeed is asked for, but the strategy is {cluster.strategy}", where=where, fix=fix)
    return cfg


def build_strategy_environment(cfg: RunConfig, folder: RunFolder, *, scale: Scale, has_gpu: bool) -> dict[str, str]:
    """Return the environment variables that make the workers use `cluster.strategy`. Raise ConfigError where the
    strategy does not fit the number of processes or the DeepSpeed file.
    """
    from sftplay.launch.command.deepspeed_json import read_deepspeed, run_values
    from sftplay.launch.command.strategy import strategy_environment

    strategy, deepspeed_file = cfg.cluster.strategy, cfg.cluster.deepspeed
    if deepspeed_file is not None:
        stage = ZERO_STAGES.get(strategy)
        read_deepspeed(Path(deepspeed_file), run_values(cfg, world_size=scale.world_size, stage=stage))
    return strategy_environment(
        strategy, world_size=scale.world_size, has_gpu=has_gpu, precision=str(cfg.train.precision),
        deepspeed_json=folder.path / PLAIN if deepspeed_file is not None else None,
        gradient_accumulation=int(cfg.train.grad_accum), nnodes=scale.nnodes,
    )  # fmt: skip


def prepare_deepspeed(cfg: RunConfig, folder: RunFolder, *, command: Launch, node: int = 0) -> None:
    """Where the run uses DeepSpeed, build the operators that this node needs; on node 0 also write the plain file.
    Raise MachineError where DeepSpeed is missing, or its operators cannot be built.
    """
    if "ACCELERATE_USE_DEEPSPEED" not in command.env:
        return
    from sftplay.launch.command.deepspeed_json import read_deepspeed, write_plain

    offloads = False
    if cfg.cluster.deepspeed is not None:
        values = read_deepspeed(Path(cfg.cluster.deepspeed))
        offloads = "offload_optimizer" in values.get("zero_optimization", {})
        if node == 0:
            write_plain(values, folder.path / PLAIN)
    prebuild_deepspeed_ops(has_gpu="DS_ACCELERATOR" not in command.env, offloads=offloads)


def with_accumulation(command: Launch, cfg: RunConfig) -> Launch:
    """Return the command with the accumulation of `cfg`. DeepSpeed reads it from the environment."""
    if ACCUMULATION not in command.env:
        return command
    return replace(command, env={**command.env, ACCUMULATION: str(cfg.train.grad_accum)})


def prebuild_deepspeed_ops(*, has_gpu: bool, offloads: bool) -> None:
    """Build DeepSpeed's operators once, with a line on the screen. Otherwise all workers build them at their start.

    A CPU needs the one for communication between processes. `offloads` adds the optimizer that runs on the host. Raise
    MachineError where DeepSpeed is not installed, a killed build left a lock, or the compiler failed.
    """
    from sftplay.launch.command.strategy import build_environment
    from sftplay.machine.doctor.system import check_builds

    if find_spec("deepspeed") is None:
        raise MachineError("is not installed", where="deepspeed", fix="make install EXTRAS=deepspeed")
    for finding in check_builds():
        if finding.level == "warn":
            raise MachineError(finding.what, where="deepspeed", fix=finding.fix)
    env = build_environment(has_gpu=has_gpu)
    folder = Path(env["TORCH_EXTENSIONS_DIR"])
    needed = {"ShareMemCommBuilder": not has_gpu, "CPUAdamBuilder": offloads}
    files = {builder: folder / name / f"{name}.so" for builder, name in OPERATORS.items() if needed[builder]}
    missing = [builder for builder, file in files.items() if not file.exists()]
    if not missing:
        return
    names = " and ".join("CPU communication" if name == "ShareMemCommBuilder" else "CPU optimizer" for name in missing)
    log.say(f"building DeepSpeed's {names}, about 2 min each, once", "deepspeed")
    started = time.monotonic()
    load = (
        "import sys\nfrom deepspeed.accelerator import get_accelerator\n"
        "for name in sys.argv[1:]:\n    get_accelerator().create_op_builder(name).load()\n"
    )
    argv = [sys.executable, "-c", load, *missing]
    done = subprocess.run(argv, env=os.environ | env, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        problem = next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "no reason given")
        fix = "apt install g++ (Debian, Ubuntu), or cluster.strategy: ddp"
        raise MachineError(f"its operators cannot be built: {problem}", where="deepspeed", fix=fix)
    log.say(f"built in {time.monotonic() - started:.0f} s, kept in {folder}", "deepspeed")
