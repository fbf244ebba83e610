"""A LoRA run says what its adapter can hold beside what it shall learn, and with which rate."""

from __future__ import annotations

from pathlib import Path

from sftplay.config.load import load_config
from sftplay.train.setup import describe_capacity, describe_rate

CONFIG = Path(__file__).resolve().parents[2] / "configs/run_demo.yaml"


def test_two_bits_a_parameter_hold_one_bit_a_token_and_less_is_a_warning_with_its_remedy():
    fits = "adapter: 500.0K parameters for 1.0M learned tokens, 0.5 a token: it can hold them"
    assert describe_capacity(500_000, 1_000_000) == fits
    said = describe_capacity(499_000, 1_000_000)
    assert said.startswith("warning: the adapter has 499.0K parameters for 1.0M learned tokens")
    assert "tuning.lora.r" in said
    assert describe_capacity(10, 0) == ""


def test_the_rate_is_told_with_its_reason_or_its_place():
    cfg = load_config(CONFIG)
    assert f"({'set by'} {cfg.origins['train.learning_rate']})" in describe_rate(cfg, {})
    chosen = {"decisions": [{"key": "train.learning_rate", "value": 2e-4, "reason": "usual peak rate of lora sft"}]}
    auto = cfg.with_values({"train.learning_rate": 2e-4}, "auto")
    assert describe_rate(auto, chosen).startswith("learning rate: 0.0002 at its peak")
    assert "(usual peak rate of lora sft)" in describe_rate(auto, chosen)
