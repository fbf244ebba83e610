"""A family that the table lacks is counted by transformers' own class: in a child process, once, and that is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from sftplay.model.adapter import every_linear_of_text
from sftplay.plan import built_shape
from sftplay.plan.find_shape import find_shape
from sftplay.plan.memory_setup import Adapter, MemorySetup, trained_params

TOKENS = {"vocab_size": 160, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, **TOKENS}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
SCAN = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128, "mamba_d_state": 16, "mamba_n_groups": 1}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1}
LIKE_LLAMA = {"model_type": "llama", **SIZES}
FAMILIES: dict[str, tuple[dict[str, Any], bool]] = {
    "lfm2": (SIZES | {"layer_types": ["conv", "conv", "full_attention", "conv"]}, True),
    "falcon_h1": (SIZES | SCAN, True),
    "jamba": (
        SIZES | {"attn_layer_offset": 1, "attn_layer_period": 2, "num_experts": 4, "expert_layer_period": 2},
        True,
    ),
    "deepseek_v3": (SIZES | LATENT | EXPERTS | {"num_key_value_heads": 4, "first_k_dense_replace": 1}, False),
    "glm4_moe_lite": (SIZES | LATENT | EXPERTS | {"num_key_value_heads": 4}, False),
    "minimax": (SIZES | {"num_local_experts": 4}, True),
    "llama4_text": (SIZES | {"intermediate_size_mlp": 96, "num_local_experts": 4, "head_dim": 16}, False),
    "ernie4_5_moe": (SIZES | {"moe_num_experts": 4, "moe_intermediate_size": 24}, False),
    "phimoe": (SIZES | {"num_local_experts": 4}, False),
    "nemotron_h": (
        TOKENS
        | {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
        | {"head_dim": 16, "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]}
        | {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1},
        True,
    ),
    "mpt": ({"d_model": 64, "n_layers": 3, "n_heads": 4, "vocab_size": 160}, False),
}
"""Family -> a small config, and whether its layers carry a state along the row."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILIES)
def test_every_parameter_is_counted_and_layers_that_carry_a_state_are_known(kind: str):
    values, leaks = FAMILIES[kind]
    config = {"model_type": kind, **values}
    shape = built_shape._read(json.loads(json.dumps(built_shape.describe(config))), name="x")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **values))
    head = model.get_output_embeddings()
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    assert shape.total_params + shape.vision_params == sum(p.numel() for p in model.parameters())
    assert shape.linear_params == sum(m.weight.numel() for m in linears)
    assert (shape.family, shape.state_leaks) == (kind, leaks)
    assert bool(shape.unmodelled) or not leaks
    with torch.device("meta"):
        adapted = get_peft_model(model, LoraConfig(r=4, target_modules=every_linear_of_text(model)))
    setup = MemorySetup(weight_bytes=2, compute_bytes=2, stream_bytes=2, adapter=Adapter(rank=4))
    assert trained_params(shape, setup) == sum(p.numel() for p in adapted.parameters() if p.requires_grad)


@pytest.mark.slow
def test_a_folder_of_an_unknown_family_is_counted_by_a_child_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SFTPLAY_CACHE", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "lfm2", **FAMILIES["lfm2"][0]}))
    said: list[str] = []
    monkeypatch.setattr(built_shape.log, "status", lambda text, tag: said.append(text))
    shape = find_shape(str(tmp_path))
    assert shape is not None
    assert (shape.family, shape.layers, shape.state_leaks) == ("lfm2", 4, True)
    assert len(said) == 1
    assert "by transformers' own class" in said[0]
    monkeypatch.setattr(built_shape, "_ask_child", lambda config: pytest.fail("asked again"))
    assert find_shape(str(tmp_path)) == shape


def test_what_transformers_cannot_build_is_read_as_a_llama_and_asked_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SFTPLAY_CACHE", str(tmp_path / "cache"))
    asked: list[Any] = []
    monkeypatch.setattr(built_shape, "_ask_child", lambda config: asked.append(config) or {"error": "no"})
    for kind, times in (("newcomer", 0), ("lfm2", 1), ("lfm2", 1)):
        (tmp_path / "config.json").write_text(json.dumps(LIKE_LLAMA | {"model_type": kind}))
        shape = find_shape(str(tmp_path))
        assert shape is not None
        assert any("read as a Llama" in what for what in shape.unmodelled)
        assert len(asked) == times


def test_why_a_model_cannot_be_counted_is_said_and_a_silent_child_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("SFTPLAY_CACHE", str(tmp_path))
    monkeypatch.setattr(built_shape, "LONGEST_S", 0.01)  # no Python starts so fast
    assert built_shape.built_shape(LIKE_LLAMA, name="slow/model") is None
    assert "slow/model cannot be counted by transformers' own class" in capsys.readouterr().out
    assert not list(tmp_path.rglob("*.json"))
    monkeypatch.setattr(built_shape, "LONGEST_S", 300)
    assert built_shape.built_shape({"model_type": "no_such_model"}, name="odd/model") is None
    assert "odd/model cannot be counted by transformers' own class: ValueError" in capsys.readouterr().out
    assert len(list(tmp_path.rglob("*.json"))) == 1
