"""Adapters on models whose experts are one tensor a layer: what trains is said, merged and continued as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from sftplay.config.run import LoraConfig
from sftplay.model.adapter import add_adapter, attach_adapter, continue_adapter, describe_experts
from sftplay.model.merging import merge_adapter

SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 128, "num_hidden_layers": 2, "num_experts_per_tok": 2,
}  # fmt: skip
FAMILIES = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 32},
    "mixtral": {"num_local_experts": 4},
    "olmoe": {"num_experts": 4},
    "glm4_moe": {"n_routed_experts": 4, "moe_intermediate_size": 32, "first_k_dense_replace": 1},
    "gpt_oss": {"num_local_experts": 4},
    "qwen3": {},
}
IDS = torch.arange(20)[None]


def make(family: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**SMALL, **FAMILIES[family])).eval()


def perturb(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.1)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "qwen3"])
def test_a_merged_mixture_answers_as_its_adapter(family: str, tmp_path: Path):
    base = make(family)
    plain = base(IDS).logits
    base.save_pretrained(tmp_path / "base")
    adapted = add_adapter(base, LoraConfig(r=4))
    perturb(adapted)
    logits = adapted(IDS).logits
    adapted.save_pretrained(tmp_path / "adapter")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    whole, _ = merge_adapter(again, tmp_path / "adapter", dtype=None, fix="")
    torch.testing.assert_close(whole.eval()(IDS).logits, logits, atol=1e-5, rtol=1e-5)
    assert (logits - plain).abs().max() > 1e-2


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_an_adapter_of_a_mixture_is_continued(family: str, tmp_path: Path):
    base = make(family)
    base.save_pretrained(tmp_path / "base")
    adapted = add_adapter(base, LoraConfig(r=4))
    perturb(adapted)
    adapted.save_pretrained(tmp_path / "adapter")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    continued = continue_adapter(again, LoraConfig(r=4), adapter=tmp_path / "adapter")
    torch.testing.assert_close(continued.eval()(IDS).logits, adapted(IDS).logits)
    kinds = [{n for n, p in model.named_parameters() if p.requires_grad} for model in (adapted, continued)]
    assert kinds[0] == kinds[1]


def test_experts_that_train_nothing_are_said_with_their_size():
    adapted = add_adapter(make("gpt_oss"), LoraConfig(r=4))
    # two layers of 4 experts: 64 to 2 * 96, and 96 to 64
    weights = 2 * 4 * (64 * 192 + 96 * 64)
    assert weights == 147_456
    assert describe_experts(adapted) == (
        "the experts (147.5K weights) train nothing: the adapter is on the other layers only"
    )


def test_pairs_on_experts_are_said_with_their_size():
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate", "gate_proj", "up_proj", "down_proj"]
    adapted = add_adapter(make("qwen3_moe"), LoraConfig(r=4, target_modules=names))
    experts = 2 * 4 * (8 * (64 + 64) + 4 * (32 + 64))  # rank 8 on gate and up together
    router = 2 * 4 * (64 + 4)
    assert experts + router == 11_808
    text = describe_experts(adapted)
    assert text is not None
    assert "11.8K of the weights that train are theirs" in text


def test_a_full_copy_of_experts_is_said_with_its_size():
    adapted = add_adapter(make("gpt_oss"), LoraConfig(r=4, modules_to_save=["experts"]))
    text = describe_experts(adapted)
    assert text is not None
    assert 147_456 + 2 * 4 * (192 + 64) == 149_504  # and their biases
    assert "a copy of 149.5K weights" in text
    assert "modules_to_save" in text


def test_a_model_without_experts_says_nothing_of_them():
    assert describe_experts(add_adapter(make("qwen3"), LoraConfig(r=4))) is None


def test_a_stored_adapter_of_a_mixture_is_attached_bit_for_bit(tmp_path: Path):
    base = make("mixtral")
    base.save_pretrained(tmp_path / "base")
    adapted = add_adapter(base, LoraConfig(r=4))
    perturb(adapted)
    adapted.save_pretrained(tmp_path / "adapter")
    again = attach_adapter(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    assert torch.equal(again.eval()(IDS).logits, adapted(IDS).logits)
