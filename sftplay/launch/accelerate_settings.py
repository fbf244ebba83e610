"""What accelerate reads of the strategy: the environment of a worker, and a config for the user's own scripts."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from pathlib import Path

from sftplay.atomic import write_text
from sftplay.config.cluster import SHARDED, ZERO_STAGES
from sftplay.errors import ConfigError
from sftplay.machine.doctor import builds_folder

LEAST_HSDP = 4  # fewest processes of hsdp: two copies of a model, each split over two processes


def strategy_environment(
    strategy: str,
    *,
    world_size: int,
    has_gpu: bool,
    precision: str,
    deepspeed_json: Path | None = None,
    gradient_accumulation: int = 1,
    nnodes: int = 1,
) -> dict[str, str]:
    """The workers' variables for `cluster.strategy`. `precision` is fp32, bf16 or fp16.

    `deepspeed_json` is JSON without comments, for ZeRO only; it sets stage
    and offloading itself. `gradient_accumulation` must be the Trainer's. Raises ConfigError for
    a JSON for a strategy without DeepSpeed, or processes that hsdp cannot divide.
    """
    if deepspeed_json is not None and strategy not in ZERO_STAGES:
        fix = f"write cluster.strategy: {', '.join(ZERO_STAGES)}; or leave cluster.deepspeed out"
        what = f"a DeepSpeed file is given, but {strategy} does not use it"
        raise ConfigError(what, where="cluster.deepspeed", fix=fix)
    if strategy in ZERO_STAGES:
        env = build_environment(has_gpu=has_gpu) | {
            "ACCELERATE_USE_DEEPSPEED": "true",
            # The model is built as a whole and split afterwards. zero.Init would draw random weights (a builtin model,
            # an adapter) shard by shard, which gives other weights for the seed. It cannot gather 4-bit weights either.
            "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
        }
        if deepspeed_json is not None:
            env["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(deepspeed_json)
        else:
            stage = ZERO_STAGES[strategy]
            env |= {
                "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(stage),
                "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": str(gradient_accumulation),
                "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "none",
                "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
                # Without it stage 3 cannot write complete weights at the end.
                "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": str(stage == 3).lower(),
            }
    elif strategy in SHARDED:
        env = {
            "ACCELERATE_USE_FSDP": "true",
            "FSDP_VERSION": "2",
            "FSDP_RESHARD_AFTER_FORWARD": "true",
            "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",  # by the model's own `_no_split_modules`
            # The Trainer saves a result only from a full state dict. A sharded one must be merged by hand.
            "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
            "FSDP_OFFLOAD_PARAMS": "false",
            # Otherwise ranks but the first would hold empty weights, which fails with adapters and 4-bit weights.
            "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
            # The Trainer's own checkpointing is used. Accelerate refuses both at once.
            "FSDP_ACTIVATION_CHECKPOINTING": "false",
        }
        if not has_gpu:
            env["ACCELERATE_TORCH_DEVICE"] = "cpu"
        if strategy == "hsdp":  # one copy of the model per node, split over its processes; on a single node two copies
            copies = nnodes if nnodes > 1 else 2
            if world_size < LEAST_HSDP or world_size % copies or world_size // copies < 2:
                what = f"hsdp splits each of {copies} model copies over 2 or more processes; {world_size} processes"
                fix = f"use {max(LEAST_HSDP, 2 * copies)} processes or another multiple, or cluster.strategy: fsdp"
                raise ConfigError(f"{what} do not fit", where="cluster.strategy", fix=fix)
            env["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
            env["PARALLELISM_CONFIG_DP_REPLICATE_SIZE"] = str(copies)
            env["PARALLELISM_CONFIG_DP_SHARD_SIZE"] = str(world_size // copies)
    else:
        # Without it each rank trains alone as the main one, and all exit with 0.
        env = {"ACCELERATE_USE_CPU": "true"} if world_size > 1 and not has_gpu else {}
    return env | {"ACCELERATE_MIXED_PRECISION": "no" if precision == "fp32" else precision}


def build_environment(*, has_gpu: bool) -> dict[str, str]:
    """The folder where DeepSpeed's operators are built, and the device they are for. The user's own settings stay.

    The folder is in this project, because a killed build leaves a lock there and all later starts wait for it.
    """
    env = {"TORCH_EXTENSIONS_DIR": str(builds_folder(os.environ))}
    if not has_gpu:
        env["DS_ACCELERATOR"] = "cpu"
    programs = Path(sys.executable).parent
    # torch starts `ninja` by its name each time it loads an operator, even a built one. A .venv may not be on PATH.
    if shutil.which("ninja") is None and (programs / "ninja").exists():
        env["PATH"] = os.pathsep.join([str(programs), os.environ.get("PATH", os.defpath)])
    return env


CHECKSUM_LINE = "# Written by make setup-accelerate for this machine. Sum of what follows: "

_TEMPLATE = """\
# {about}
# Use:  accelerate launch --config_file {path} your_script.py
# (make train needs no such file.)
compute_environment: LOCAL_MACHINE
distributed_type: "{kind}"
num_machines: 1
machine_rank: 0
num_processes: {processes}   # {counted}
mixed_precision: "{precision}"   # {reason}
use_cpu: {use_cpu}
main_training_function: main
"""


def accelerate_text(path: Path, *, gpus: int, has_bf16: bool) -> str:
    """A config for the `gpus` of a machine, or one process on its CPU, which uses all cores."""
    processes = gpus or 1
    about = f"{gpus or 'No'} GPU{'' if gpus == 1 else 's'}: {processes} process{'es' if processes > 1 else ''}."
    precision, reason = "no", "a CPU is fastest in fp32"
    if not gpus:
        about += " Several processes on CPUs: accelerate_configs/cpu_ddp.yaml."
    elif has_bf16:
        precision, reason = "bf16", "this GPU has it"
    else:
        precision, reason = "fp16", "a GPU older than Ampere has no bf16"
    text = _TEMPLATE.format(
        about=about, path=path, kind="MULTI_GPU" if processes > 1 else "NO", processes=processes,
        counted="one per GPU" if gpus else "its threads share the cores", precision=precision, reason=reason,
        use_cpu=str(not gpus).lower(),
    )  # fmt: skip
    return f"{CHECKSUM_LINE}{_checksum(text)}\n{text}"


def write_accelerate(path: Path, text: str) -> None:
    """Write the file; ConfigError if the user has changed or written the one at `path`."""
    if path.exists() and not is_untouched(path.read_text(encoding="utf-8", errors="replace")):
        fix = "move it away, or give another file: make setup-accelerate OUT=accelerate_configs/mine.yaml"
        raise ConfigError("was changed after it was written, and stays as it is", where=str(path), fix=fix)
    write_text(path, text)


def is_untouched(text: str) -> bool:
    """True for a text from `accelerate_text` that nobody has changed."""
    first, _, rest = text.partition("\n")
    return first == CHECKSUM_LINE + _checksum(rest)


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
