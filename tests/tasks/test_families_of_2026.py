"""Tiny random models of the families of 2026 train by the kit: their loss falls, in full and by LoRA, by every head."""

from __future__ import annotations

from pathlib import Path
from shutil import copy
from typing import Any

import pytest
import torch
from in_process import Inputs, train
from transformers import AutoConfig, AutoModelForCausalLM

from sftplay.plan.shape_from_config import shape_from_config

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 400, "pad_token_id": 0, "bos_token_id": None,
         "eos_token_id": 2}  # fmt: skip
DELTA = {f"linear_{what}": 4 for what in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")}
TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"]}
MIXED = {"layer_types": ["linear_attention", "full_attention"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": SIZES | DELTA | MIXED,
    "gemma4_text": SIZES
    | {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 400, "global_head_dim": 16, "bos_token_id": 1}
    | TWO_KINDS,
    "gpt_oss": SIZES | TWO_KINDS | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "ministral3": SIZES,
    "glm4_moe": SIZES | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lora", "full"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_model_of_the_family_trains_with_the_parameters_that_the_plan_counts(
    kind: str, mode: str, inputs: Inputs, tmp_path: Path
):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **FAMILIES[kind]), dtype=torch.float32)
    source = tmp_path / "model"
    model.save_pretrained(source)
    for file in (*inputs.model.glob("tokenizer*"), *inputs.model.glob("chat_template*")):
        copy(file, source)
    attention = {"model__attn": "eager"} if kind == "gpt_oss" else {}
    values = {"tuning__mode": mode, "train__max_steps": 2, "model__name": str(source), **attention}
    finals = []
    for head in ("standard", "chunked"):
        done = train(tmp_path / head, Inputs(source, inputs.train, inputs.held_out), train__loss_head=head, **values)
        losses = [line["loss"] for line in done.metrics if "loss" in line]
        assert len(losses) == 2
        assert losses[1] < losses[0]
        finals.append(losses[1])
    assert finals == pytest.approx([finals[0]] * len(finals), rel=1e-4)
    shape = shape_from_config({"model_type": kind, **FAMILIES[kind]}, name="x")
    settings = (vars(model.config), vars(done.trainer.model.config.get_text_config()))  # TRL writes into the second
    for key in ("output_router_logits", "router_aux_loss_coef"):
        assert settings[0].get(key) == settings[1].get(key)
    if mode == "full":
        assert sum(p.numel() for p in done.trainer.model.parameters()) == shape.total_params
