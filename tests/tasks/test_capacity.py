"""What a run says before its first step: what its adapter can hold, its rate, and the optimizer of an old GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from sftplay.config.load import load_config
from sftplay.errors import ConfigError
from sftplay.machine.gpu import Gpu
from sftplay.machine.probe import Machine
from sftplay.plan.sizing import decide_numerics
from sftplay.train.train_run import describe_capacity, describe_rate

CONFIG = Path(__file__).resolve().parents[2] / "configs/run_demo.yaml"


def test_two_bits_a_parameter_hold_one_bit_a_token_and_less_is_a_warning_with_its_remedy():
    fits = "adapter: 500.0K parameters for 1.0M learned tokens, 0.5 a token: it can hold them"
    assert describe_capacity(500_000, 1_000_000) == fits
    said = describe_capacity(499_000, 1_000_000)
    assert said.startswith("warning: the adapter has 499.0K parameters for 1.0M learned tokens")
    assert "tuning.lora.r" in said
    assert describe_capacity(10, 0) == ""


def test_the_rate_stands_with_its_reason_or_its_place():
    cfg = load_config(CONFIG)
    assert f"(set by {cfg.origins['train.learning_rate']})" in describe_rate(cfg, {})
    chosen = {"decisions": [{"key": "train.learning_rate", "value": 2e-4, "reason": "usual peak rate of lora sft"}]}
    auto = cfg.with_values({"train.learning_rate": 2e-4}, "auto")
    assert describe_rate(auto, chosen).startswith("learning rate: 0.0002 at its peak")
    assert "(usual peak rate of lora sft)" in describe_rate(auto, chosen)


def test_a_v100_gets_an_optimizer_whose_steps_can_be_left_out_and_the_fused_one_is_refused():
    v100 = Gpu(0, "Tesla V100-SXM2-16GB", total_bytes=16 * 2**30, free_bytes=15 * 2**30, capability=(7, 0))
    machine = Machine(
        gpus=(v100,), gpu_reason="", ram_bytes=2**36, cores=8, python="3.11", system="Linux", libraries={}
    )
    cfg = load_config(CONFIG, ["train.precision=auto", "train.optim=auto"])
    decided = decide_numerics(cfg, machine)
    assert (decided["train.precision"].value, decided["train.optim"].value) == ("fp16", "adamw_torch")
    with pytest.raises(ConfigError, match="hides from the schedule which steps overflowed") as refusal:
        decide_numerics(cfg.with_values({"train.optim": "adamw_torch_fused"}, "test"), machine)
    assert refusal.value.fix == "write train.optim: adamw_torch, or leave it on auto"
