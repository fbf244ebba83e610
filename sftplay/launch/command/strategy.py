"""The environment by which accelerate, in a worker started by torchrun, takes up a strategy. It starts nothing.

Variables are those that accelerate 1.15 reads (`utils/dataclasses.py`, `state.py`, `parallelism_config.py`); a worker
that does not find them trains with plain DDP and says nothing, so the preflight compares what came out. On a CPU the
worker must also be told `use_cpu=False, ddp_backend="gloo"` under ZeRO: `use_cpu=True` turns DeepSpeed off in silence.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from sftplay.config.schema.cluster import SHARDED
from sftplay.errors import ConfigError
from sftplay.machine.doctor.system import builds_folder

ZERO_STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}
KNOWN = ("single", "ddp", *SHARDED)

LEAST_HSDP = 4
"""Two copies of a model that is split over two processes."""


def strategy_environment(
    strategy: str,
    *,
    world_size: int,
    has_gpu: bool,
    precision: str,
    layer_class: str | None = None,
    deepspeed_json: Path | None = None,
    gradient_accumulation: int = 1,
    nnodes: int = 1,
) -> dict[str, str]:
    """What the workers' environment needs for `strategy`, one of `KNOWN`, with `precision` fp32, bf16 or fp16.

    `layer_class` names the model's decoder layer(s), comma between; None lets accelerate take the model's own
    `_no_split_modules`. `deepspeed_json` is plain JSON (see `deepspeed_json.write_plain`), for ZeRO only, and then says
    the stage and the offloading itself. `gradient_accumulation` must be the number the Trainer is given.

    Raises:
        ConfigError: no such strategy, a JSON where no DeepSpeed runs, or hsdp on processes it cannot divide.
    """
    if strategy not in KNOWN:
        raise ConfigError(f"no strategy {strategy!r}", where="cluster.strategy", fix=f"choose from {', '.join(KNOWN)}")
    if deepspeed_json is not None and strategy not in ZERO_STAGES:
        fix = f"write cluster.strategy: {', '.join(ZERO_STAGES)}; or leave cluster.deepspeed out"
        raise ConfigError(
            f"a DeepSpeed file is given, but {strategy} does not use it", where="cluster.deepspeed", fix=fix
        )
    if strategy in ZERO_STAGES:
        env = _zero(
            ZERO_STAGES[strategy], deepspeed_json, gradient_accumulation=gradient_accumulation
        ) | build_environment(has_gpu=has_gpu)
    elif strategy in SHARDED:
        env = _fsdp(layer_class, has_gpu=has_gpu)
        env |= _mesh(world_size, nnodes) if strategy == "hsdp" else {}
    else:
        # Without it both ranks train alone, each believing to be the main one, and exit with 0.
        env = {"ACCELERATE_USE_CPU": "true"} if world_size > 1 and not has_gpu else {}
    return env | {"ACCELERATE_MIXED_PRECISION": "no" if precision == "fp32" else precision}


def build_environment(*, has_gpu: bool) -> dict[str, str]:
    """Where DeepSpeed's operators are built and found again, and for which device; the user's settings are kept.

    The folder is the project's own: a build that is killed leaves a lock there for which all later starts wait.
    """
    env = {"TORCH_EXTENSIONS_DIR": str(builds_folder(os.environ))}
    if not has_gpu:
        env["DS_ACCELERATOR"] = "cpu"
    beside = Path(sys.executable).parent
    # torch starts `ninja` by its name, at every load, also of what is built; a .venv need not be on PATH.
    if shutil.which("ninja") is None and (beside / "ninja").exists():
        env["PATH"] = os.pathsep.join([str(beside), os.environ.get("PATH", os.defpath)])
    return env


def _zero(stage: int, deepspeed_json: Path | None, *, gradient_accumulation: int) -> dict[str, str]:
    env = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        # The model is built whole and split afterwards: weights of a builtin model and of an adapter come from the
        # seed, which zero.Init would draw shard by shard, and 4-bit weights cannot be gathered during loading.
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
    }
    if deepspeed_json is not None:
        return env | {"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(deepspeed_json)}
    return env | {
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(stage),
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": str(gradient_accumulation),
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "none",
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
        # Without it stage 3 has no whole weights to write at the end.
        "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": str(stage == 3).lower(),
    }


def _fsdp(layer_class: str | None, *, has_gpu: bool) -> dict[str, str]:
    env = {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        # The Trainer writes a result only from a full one; a sharded one it leaves to a merge by hand.
        "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
        "FSDP_OFFLOAD_PARAMS": "false",
        # Ranks other than the first would hold empty weights, which adapters and 4-bit weights do not survive.
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
        # The Trainer's own checkpointing is used; both at once are refused.
        "FSDP_ACTIVATION_CHECKPOINTING": "false",
    }
    if layer_class is not None:
        env["FSDP_TRANSFORMER_CLS_TO_WRAP"] = layer_class
    if not has_gpu:
        env["ACCELERATE_TORCH_DEVICE"] = "cpu"
    return env


def _mesh(world_size: int, nnodes: int) -> dict[str, str]:
    """A copy of the model on every node, split inside it; on one node two copies."""
    copies = nnodes if nnodes > 1 else 2
    if world_size < LEAST_HSDP or world_size % copies or world_size // copies < 2:
        what = f"hsdp keeps {copies} copies of a model, each split over at least 2; {world_size} processes do not do"
        fix = f"use {max(LEAST_HSDP, 2 * copies)} processes or another multiple, or cluster.strategy: fsdp"
        raise ConfigError(what, where="cluster.strategy", fix=fix)
    return {
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": str(copies),
        "PARALLELISM_CONFIG_DP_SHARD_SIZE": str(world_size // copies),
    }
