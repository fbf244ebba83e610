"""The environment of a strategy, compared with what accelerate itself sets and reads."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import pytest

from sftplay.config.cluster import SHARDED, ZERO_STAGES
from sftplay.errors import ConfigError
from sftplay.launch.accelerate_settings import strategy_environment

GPUS = {"world_size": 4, "has_gpu": True, "precision": "bf16"}


@pytest.fixture(autouse=True)
def no_strategy_of_our_own(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_", "DS_", "TORCH_EXTENSIONS")):
            monkeypatch.delenv(name)


def launched_by_accelerate(*flags):
    """The environment that `accelerate launch` gives its workers for some flags."""
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    words = ["--num_processes", "4", "--num_machines", "1", "--dynamo_backend", "no", *flags, "train.py"]
    args: argparse.Namespace = launch_command_parser().parse_args(words)
    args.main_process_port, args.num_cpu_threads_per_process = 0, 1
    args.deepspeed_fields_from_accelerate_config = ""
    return prepare_deepspeed_cmd_env(args)[1] if args.use_deepspeed else prepare_multi_gpu_env(args)


def differing(ours, theirs):
    return {name: (value, theirs.get(name)) for name, value in ours.items() if theirs.get(name) != value}


@pytest.mark.parametrize("strategy", ZERO_STAGES)
def test_zero_has_the_environment_of_accelerate_launch(strategy):
    ours = strategy_environment(strategy, **GPUS, gradient_accumulation=3)
    del ours["TORCH_EXTENSIONS_DIR"]
    ours.pop("PATH", None)
    flags = ["--use_deepspeed", "--zero_stage", str(ZERO_STAGES[strategy]), "--gradient_accumulation_steps", "3"]
    flags += ["--offload_optimizer_device", "none", "--offload_param_device", "none", "--zero3_init_flag", "false"]
    flags += ["--zero3_save_16bit_model", str(strategy == "zero3").lower(), "--mixed_precision", "bf16"]
    assert differing(ours, launched_by_accelerate(*flags)) == {}


@pytest.mark.parametrize("strategy", ["fsdp", "hsdp"])
def test_fsdp_has_the_environment_of_accelerate_launch(strategy):
    ours = strategy_environment(strategy, **GPUS)
    flags = ["--use_fsdp", "--fsdp_version", "2", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"]
    flags += ["--fsdp_reshard_after_forward", "true", "--fsdp_state_dict_type", "FULL_STATE_DICT"]
    flags += ["--fsdp_cpu_ram_efficient_loading", "false", "--mixed_precision", "bf16"]
    if strategy == "hsdp":
        flags += ["--use_parallelism_config", "--parallelism_config_dp_replicate_size", "2"]
        flags += ["--parallelism_config_dp_shard_size", "2"]
    assert differing(ours, launched_by_accelerate(*flags)) == {}


def test_deepspeed_on_a_cpu_is_not_told_to_use_the_cpu_which_would_turn_it_off():
    for strategy in SHARDED:
        env = strategy_environment(strategy, world_size=4, has_gpu=False, precision="fp32")
        assert "ACCELERATE_USE_CPU" not in env
    plain = strategy_environment("ddp", world_size=4, has_gpu=False, precision="fp32")
    assert plain == {"ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": "no"}


def test_a_deepspeed_file_is_handed_over_and_says_the_stage_itself():
    env = strategy_environment("zero2", **GPUS, deepspeed_json=Path("run/deepspeed.json"))
    assert env["ACCELERATE_DEEPSPEED_CONFIG_FILE"] == "run/deepspeed.json"
    assert "ACCELERATE_DEEPSPEED_ZERO_STAGE" not in env


def test_operators_are_built_in_the_project_unless_the_user_says_where(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert strategy_environment("zero1", **GPUS)["TORCH_EXTENSIONS_DIR"] == str(tmp_path / ".cache/torch_extensions")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/elsewhere")
    assert strategy_environment("zero1", **GPUS)["TORCH_EXTENSIONS_DIR"] == "/elsewhere"


def test_ninja_of_a_venv_that_is_not_on_the_path_is_found(monkeypatch, tmp_path):
    (tmp_path / "ninja").touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", "/nowhere")
    assert strategy_environment("zero1", **GPUS)["PATH"] == f"{tmp_path}{os.pathsep}/nowhere"


@pytest.mark.parametrize(("world_size", "nnodes", "mesh"), [(4, 1, (2, 2)), (16, 2, (2, 8)), (32, 4, (4, 8))])
def test_hsdp_keeps_a_copy_on_every_node_or_two_on_one(world_size, nnodes, mesh):
    env = strategy_environment("hsdp", **GPUS | {"world_size": world_size}, nnodes=nnodes)
    names = ("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "PARALLELISM_CONFIG_DP_SHARD_SIZE")
    assert tuple(int(env[name]) for name in names) == mesh


@pytest.mark.parametrize(("world_size", "nnodes"), [(1, 1), (2, 1), (5, 1), (3, 3)])
def test_hsdp_on_processes_it_cannot_divide_is_refused(world_size, nnodes):
    with pytest.raises(ConfigError, match="hsdp"):
        strategy_environment("hsdp", **GPUS | {"world_size": world_size}, nnodes=nnodes)


def test_a_deepspeed_file_without_deepspeed_is_refused():
    with pytest.raises(ConfigError, match="does not use it"):
        strategy_environment("fsdp", **GPUS, deepspeed_json=Path("zero2.json"))
