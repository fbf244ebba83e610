"""Prepare the start: GPUs, the ZeRO stage, environment, DeepSpeed's file and operators."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from sftplay import log
from sftplay.atomic import write_text
from sftplay.config.cluster import ZERO_STAGES
from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError, MachineError
from sftplay.launch.command import Launch, Scale, one_gpu_environment
from sftplay.launch.run_folder import RunFolder
from sftplay.machine.probe import Machine, compiler_remedy, find_compiler_problem
from sftplay.plan.sizing import find_sizing

FIXED_DRIVER = "550.40.07"
"""From this driver on RTX 40 cards know that they cannot read each other's memory. accelerate 1.15 refuses several of
them with an older one (utils/environment.py, `check_cuda_p2p_ib_support`) unless `WITHOUT_PEERS` are set."""

WITHOUT_PEERS = {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}


def refuse_unusable(machine: Machine) -> None:
    """Refuse a launch on GPUs that the installed torch cannot use: it would train on the CPU with the GPUs' plan. Raise
    MachineError where the driver is too old for torch's CUDA, or torch has no CUDA or no code for a GPU.
    """
    if not machine.gpus:
        return
    from sftplay.machine.doctor import check_build

    for finding in check_build(machine):
        if finding.level == "stop":
            fix = f"{finding.fix}; or train on the CPU: export CUDA_VISIBLE_DEVICES=-1"
            raise MachineError(finding.what, where=finding.subject, fix=fix)


def refuse_missing_compiler(cfg: RunConfig, machine: Machine) -> None:
    """Refuse a run on GPUs whose first step needs kernels that Triton cannot build here.

    Task grpo does without: `avoid_triton` in train.upstream. Raise MachineError where there is no C compiler, or
    Python's headers are missing.
    """
    key, is_compiled, other = find_sizing(cfg).compiled(cfg)
    if machine.gpus and is_compiled and (problem := find_compiler_problem()):
        where = cfg.describe_origin(key, unset="chosen automatically")
        what = f"{cfg.get_value(key)} needs kernels that Triton builds, and {problem}"
        raise MachineError(what, where=where, fix=f"{compiler_remedy()}, or write {key}: {other}")


def gpu_settings(cfg: RunConfig, machine: Machine, *, processes: int) -> dict[str, str]:
    """Return the variables that the workers need for the GPUs of this machine. The user's own stay."""
    alone: dict[str, str] = {}
    if processes == 1 and not find_sizing(cfg).uses_several_gpus(cfg):
        alone = one_gpu_environment(machine.gpus, by_uuid=cfg.grpo.generation != "vllm_colocate")
    cards = [gpu.name for gpu in machine.gpus if "RTX 40" in gpu.name]
    missing = {name: value for name, value in WITHOUT_PEERS.items() if name not in os.environ}
    if not (cards and missing and machine.driver):
        return alone
    from sftplay.machine.doctor import is_within

    if is_within(machine.driver, f">={FIXED_DRIVER}"):
        return alone
    names = " and ".join(missing)
    log.say(
        f"{cards[0]} with driver {machine.driver}, older than {FIXED_DRIVER}: {names} set, for accelerate asks for it"
    )
    return {**alone, **missing}


PLAIN = "deepspeed.json"
"""The user's file without comments, in the run folder. accelerate reads no comments."""

BUILT = {"optimizer", "offload_param", "offload_optimizer", "zenflow", "compile", "data_efficiency", "checkpoint"}
BUILT |= {f"zero_quantized_{kind}" for kind in ("weights", "nontrainable_weights", "gradients")}
"""Names in that file for which DeepSpeed compiles operators when a run starts."""

ACCUMULATION = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"


def with_deepspeed(cfg: RunConfig, *, is_asked: bool) -> RunConfig:
    """Return the config with a ZeRO stage instead of `auto`, where DeepSpeed `is_asked` for or its file is named. Raise
    ConfigError where the config names another strategy, or the file cannot be used.
    """
    cluster = cfg.cluster
    if not is_asked and cluster.deepspeed is None:
        return cfg
    if cluster.strategy == "auto":
        from sftplay.launch.deepspeed_json import read_deepspeed

        values = read_deepspeed(Path(cluster.deepspeed)) if cluster.deepspeed else {}
        stage = values.get("zero_optimization", {}).get("stage")
        name = next((name for name, number in ZERO_STAGES.items() if number == stage), "zero2")
        return cfg.with_values({"cluster.strategy": name}, cluster.deepspeed or "train-deepspeed")
    if cluster.strategy not in ZERO_STAGES:
        where = cfg.describe_origin("cluster.strategy", unset="cluster")
        fix = f"write {', '.join(ZERO_STAGES)} or auto, or launch it with train-distributed"
        raise ConfigError(f"DeepSpeed is asked for, but the strategy is {cluster.strategy}", where=where, fix=fix)
    return cfg


def build_strategy_environment(cfg: RunConfig, folder: RunFolder, *, scale: Scale, has_gpu: bool) -> dict[str, str]:
    """Return the environment variables that make the workers use `cluster.strategy`. Raise ConfigError where the
    strategy does not fit the number of processes or the DeepSpeed file.
    """
    from sftplay.launch.accelerate_settings import strategy_environment
    from sftplay.launch.deepspeed_json import read_deepspeed, run_values

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
    """Where the run uses DeepSpeed, build the optimizer where its file moves it to the host; on node 0 also write the
    plain file. Raise MachineError where DeepSpeed is missing, a build that a killed one locked is due, or one fails.
    """
    if "ACCELERATE_USE_DEEPSPEED" not in command.env:
        return
    from sftplay.launch.deepspeed_json import read_deepspeed
    from sftplay.machine.doctor import check_builds

    if find_spec("deepspeed") is None:
        raise MachineError("is not installed", where="deepspeed", fix="make install EXTRAS=deepspeed")
    if cfg.cluster.deepspeed is None:
        return
    values = read_deepspeed(Path(cfg.cluster.deepspeed))
    if node == 0:
        write_text(folder.path / PLAIN, json.dumps(values, indent=2) + "\n")
    zero = values.get("zero_optimization", {})
    for finding in check_builds() if BUILT & {*values, *zero} else ():
        if finding.level == "warn":
            raise MachineError(finding.what, where="deepspeed", fix=finding.fix)
    if "offload_optimizer" in zero:
        prebuild_optimizer(has_gpu="DS_ACCELERATOR" not in command.env)


def with_accumulation(command: Launch, cfg: RunConfig) -> Launch:
    """Return the command with the accumulation of `cfg`. DeepSpeed reads it from the environment."""
    if ACCUMULATION not in command.env:
        return command
    return replace(command, env={**command.env, ACCUMULATION: str(cfg.train.grad_accum)})


def prebuild_optimizer(*, has_gpu: bool) -> None:
    """Build DeepSpeed's optimizer for the host once, with a line on the screen. Otherwise all workers build it at their
    start. Raise MachineError where the compiler failed.
    """
    from sftplay.launch.accelerate_settings import build_environment

    env = build_environment(has_gpu=has_gpu)
    folder = Path(env["TORCH_EXTENSIONS_DIR"])
    if (folder / "cpu_adam" / "cpu_adam.so").exists():
        return
    log.say("building DeepSpeed's CPU optimizer, about 2 min, once", "deepspeed")
    started = time.monotonic()
    load = (
        "from deepspeed.accelerator import get_accelerator\n"
        "get_accelerator().create_op_builder('CPUAdamBuilder').load()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", load], env=os.environ | env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        problem = next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "no reason given")
        fix = "apt install g++ (Debian, Ubuntu), or leave offload_optimizer out of the DeepSpeed file"
        raise MachineError(f"its CPU optimizer cannot be built: {problem}", where="deepspeed", fix=fix)
    log.say(f"built in {time.monotonic() - started:.0f} s, kept in {folder}", "deepspeed")
