"""Shapes against the models transformers builds on the meta device: every module, every parameter."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from sftplay.plan.config_json import FAMILIES
from sftplay.plan.find_shape import read_table
from sftplay.plan.shape import ModelShape
from sftplay.plan.shape_from_config import shape_from_config

# transformers' modeling_gpt_bigcode.py compiles three small functions when it is imported.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")

LAYER_KEYS = ("num_hidden_layers", "n_layer", "num_layers")
OWN_CODE = ("qwen", "internlm2")  # families without a class in transformers


def distinct() -> list[str]:
    """One name of the table for each shape that transformers can build."""
    found: dict[str, str] = {}
    for name, config in read_table().items():
        if config["model_type"] not in OWN_CODE:
            kept = {key: value for key, value in config.items() if key not in ("max_position_embeddings", "seq_length")}
            found.setdefault(json.dumps(kept, sort_keys=True), name)
    return list(found.values())


def shallow(config: dict[str, Any], layers: int = 2) -> dict[str, Any]:
    if "text_config" in config:
        return {**config, "text_config": shallow(config["text_config"], layers)}
    fewer = {"attention_types": [[["global", "local"], layers // 2]]} if "attention_types" in config else {}
    return {key: layers if key in LAYER_KEYS else value for key, value in config.items()} | fewer


def library_config(config: dict[str, Any]) -> Any:
    keys = dict(config)
    return AutoConfig.for_model(keys.pop("model_type"), **keys)


def build(config: dict[str, Any]) -> nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(library_config(config))


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def layers_of(model: nn.Module) -> nn.ModuleList:
    lists = {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and "vision" not in name}
    return lists[min(lists, key=len)]


def linears_of(layer: nn.Module) -> list[tuple[str, int, int, bool, bool]]:
    found = []
    for path, module in layer.named_modules():
        is_mlp = "mlp" in path or path.startswith("fc")
        if isinstance(module, Conv1D):
            found.append((path.split(".")[-1], *module.weight.shape, module.bias is not None, is_mlp))
        elif isinstance(module, nn.Linear):
            sizes = (module.in_features, module.out_features)
            found.append((path.split(".")[-1], *sizes, module.bias is not None, is_mlp))
    return sorted(found)


def is_norm(module: nn.Module) -> bool:
    return "Norm" in type(module).__name__


def check_against(model: nn.Module, shape: ModelShape) -> None:
    """Every figure of a shape that a built model of two layers shows."""
    first, second = layers_of(model)
    per_layer = sum(linear.inputs * linear.outputs for linear in shape.linears) + shape.layer_other_params
    told = [(one.name, one.inputs, one.outputs, one.bias, one.is_mlp) for one in shape.linears]
    assert sorted(told) == linears_of(first)
    assert (count(first), count(second)) == (per_layer, per_layer)
    assert count(model) - 2 * per_layer == shape.other_params + shape.vision_params
    assert sum(is_norm(child) for child in first.children()) == shape.norms_per_layer
    children = set(first.children())
    assert any(is_norm(m) for m in first.modules() if m not in children) == shape.qk_norm
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert (embedding is head) == shape.tied
    assert embedding.numel() == head.numel() == shape.vocab * shape.hidden


@pytest.mark.parametrize("name", distinct())
def test_a_shape_of_the_table_has_the_modules_transformers_builds(name):
    config = read_table()[name]
    model = build(shallow(config))
    check_against(model, shape_from_config(config, name=name))
    check_words(library_config(config).get_text_config(), shape_from_config(config, name=name))
    towers = [m for path, m in model.named_modules() if path.endswith(("vision_tower", "multi_modal_projector"))]
    assert sum(count(tower) for tower in towers) == shape_from_config(config, name=name).vision_params


def check_words(library: Any, shape: ModelShape) -> None:
    """What a shape says of a config besides counts, against the library's own reading of it."""
    activations = ("hidden_activation", "hidden_act", "activation_function", "activation")
    assert shape.activation == next((found for key in activations if (found := getattr(library, key, None))), "gelu")
    assert shape.layers == library.num_hidden_layers
    assert shape.max_positions in (getattr(library, "max_position_embeddings", None), 2048)
    assert shape.softcap_final == (getattr(library, "final_logit_softcapping", None) is not None)
    assert shape.softcap_attn == (getattr(library, "attn_logit_softcapping", None) is not None)
    window = getattr(library, "sliding_window", None) or getattr(library, "window_size", None)
    assert shape.sliding_window == window
    kinds = getattr(library, "layer_types", None) or getattr(library, "attention_layers", None) or ["alike"]
    assert all(kind == kinds[place % shape.layer_pattern] for place, kind in enumerate(kinds))
    if len(kinds) > shape.layer_pattern:
        assert (shape.layer_pattern > 1) == (len(set(kinds)) > 1)


LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 160,
    "max_position_embeddings": 32,
}
WITHOUT_KV = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 160}
OPT = {key: value for key, value in WITHOUT_KV.items() if key != "intermediate_size"} | {"ffn_dim": 96}
FALCON = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 160}
PADS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {**LLAMA, "attention_bias": True, "mlp_bias": True}),
    ("llama", {**LLAMA, "head_dim": 24, "tie_word_embeddings": True}),
    ("llama", {**WITHOUT_KV}),
    ("ministral", {**LLAMA, "head_dim": 16}),
    ("ministral3", {**LLAMA, "head_dim": 16}),
    ("qwen3", {**LLAMA, "attention_bias": True}),
    ("gemma", {**LLAMA, "attention_bias": True}),
    ("phi", {**LLAMA, "qk_layernorm": True}),
    ("granite", {**LLAMA, "mlp_bias": True}),
    ("seed_oss", {**LLAMA}),
    ("seed_oss", {**LLAMA, "attention_bias": False, "attention_out_bias": True, "mlp_bias": True}),
    ("helium", {**LLAMA, "head_dim": 16, "attention_bias": True}),
    ("hunyuan_v1_dense", {**LLAMA, "head_dim": 16}),
    ("exaone4", {**LLAMA, "sliding_window": 8}),
    ("ernie4_5", {**LLAMA, "use_bias": True}),
    ("olmo", {**LLAMA, "clip_qkv": None}),
    ("olmo2", {**LLAMA, "attention_bias": True}),
    ("olmo3", {**LLAMA}),
    ("glm4", {**LLAMA}),
    ("arcee", {**LLAMA, "attention_bias": True}),
    ("nemotron", {**LLAMA}),
    ("starcoder2", {**LLAMA, "use_bias": False}),
    ("stablelm", {**LLAMA, "qk_layernorm": True}),
    ("stablelm", {**LLAMA, "use_parallel_residual": True, "use_qkv_bias": True}),
    ("cohere", {**LLAMA, "use_qk_norm": True}),
    ("cohere2", {**LLAMA, "attention_bias": True}),
    ("gpt2", {**GPT2, "n_inner": 80}),
    ("gpt_bigcode", {**GPT2, "multi_query": False}),
    ("gptj", {**GPT2, "rotary_dim": 8}),
    ("gpt_neox", {**WITHOUT_KV, "use_parallel_residual": False, "attention_bias": False}),
    ("falcon", {**FALCON, "multi_query": False, "bias": True}),
    ("falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}),
    ("opt", {**OPT, "enable_bias": False}),
    ("qwen2_moe", {**LLAMA, "num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}),
]


@pytest.mark.parametrize(("kind", "config"), VARIANTS, ids=lambda part: part if isinstance(part, str) else "")
def test_a_family_has_the_modules_transformers_builds(kind, config):
    config = {"model_type": kind, **config}
    check_against(build(config | PADS), shape_from_config(config, name="invented"))
    check_words(library_config(config | PADS), shape_from_config(config, name="invented"))


def test_every_family_that_transformers_knows_is_built_here():
    built = {kind for kind, _ in VARIANTS} | {read_table()[name]["model_type"] for name in distinct()} | {"gemma3_text"}
    assert set(FAMILIES) - set(OWN_CODE) <= built


def test_an_opt_with_a_narrow_embedding_is_counted_with_its_projections_and_said_to_be_unmodelled():
    config = {"model_type": "opt", **OPT, "word_embed_proj_dim": 32, "do_layer_norm_before": False}
    shape = shape_from_config(config, name="invented")
    assert shape.total_params == count(build(config | PADS))
    assert "an embedding narrower than the layers" in shape.unmodelled


@pytest.mark.parametrize("uses", [True, False])
def test_a_window_that_the_config_switches_off_is_none(uses):
    # Published Qwen2 and Qwen2.5 have a sliding_window and do not use it.
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 160}  # fmt: skip
    config = {"model_type": "qwen2", **sizes, "sliding_window": 8, "use_sliding_window": uses}
    library = AutoConfig.for_model(**config)
    assert shape_from_config(config, name="x").sliding_window == library.sliding_window == (8 if uses else None)
