"""Completions by continuous batching: what trains stays fp32, and the cache is as large as a drawing."""

from __future__ import annotations

from pathlib import Path
from shutil import copy
from typing import Any

import pytest
import torch
from grpo_run import grpo_inputs, grpo_options
from in_process import new_run, train
from transformers import AutoConfig, AutoModelForCausalLM

from sftplay.errors import ConfigError


@pytest.mark.parametrize("mode", ["lora", "qlora"])
def test_weights_that_train_and_the_rotation_are_fp32_after_they_have_drawn_in_16_bits(
    mode: str, tiny_llama: Path, tmp_path: Path
):
    inputs = grpo_inputs(tiny_llama, tmp_path / "data")
    options = grpo_options(inputs, tuning__mode=mode, train__precision="bf16", train__max_steps=2)
    run = train(tmp_path, inputs, **options, grpo__generation="continuous", grpo__generation_rows=3)
    model, config = run.trainer.model, run.trainer.continuous_batching_config
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert {buffer.dtype for name, buffer in model.named_buffers() if "inv_freq" in name} == {torch.float32}
    # 3 completions of 128 tokens in pages of 32, and one page that transformers keeps for itself.
    assert (config.page_size, config.num_blocks) == (32, 13)
    assert run.trainer.args.bf16
    assert all(line["completion_tokens"] == 12 for line in run.metrics)


def test_a_cache_that_would_meet_keys_of_another_dtype_is_refused_before_anything_is_loaded(
    tiny_llama: Path, tmp_path: Path
):
    inputs = grpo_inputs(tiny_llama, tmp_path / "data")
    options = grpo_options(inputs, train__precision="bf16", grpo__generation="continuous")
    with pytest.raises(ConfigError, match="a cache in the fp32 of the weights"):
        new_run(tmp_path, inputs, **options)


SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 4, "vocab_size": 400, "pad_token_id": 0, "eos_token_id": 2}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "values", "what"),
    [
        ("qwen3_5_text", {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8}, "linear_attention"),
        ("gemma4_text", {"layer_types": ["sliding_attention", "full_attention"], "head_dim": 8, "global_head_dim": 16,
                         "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 400}, "head_dim"),
        ("deepseek_v3", {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
                         "v_head_dim": 16, "first_k_dense_replace": 2, "n_routed_experts": 4}, "no token for a prompt"),
    ],
)  # fmt: skip
def test_a_model_that_transformers_cannot_batch_so_is_refused(
    kind: str, values: dict[str, Any], what: str, tiny_llama: Path, tmp_path: Path
):
    source = tmp_path / "model"
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **values)).save_pretrained(source)
    for file in (*tiny_llama.glob("tokenizer*"), *tiny_llama.glob("chat_template*")):
        copy(file, source)
    inputs = grpo_inputs(source, tmp_path / "data")
    with pytest.raises(ConfigError, match=what) as refused:
        train(tmp_path, inputs, **grpo_options(inputs, grpo__generation="continuous", model__name=str(source)))
    assert refused.value.fix == "write grpo.generation: transformers"
