"""Shapes against the models transformers builds on the meta device: every module, every parameter."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from sftplay.model.adapter import every_linear_of_text, names_of_experts
from sftplay.plan.find_shape import read_table
from sftplay.plan.memory_setup import Adapter, MemorySetup, trained_params
from sftplay.plan.more_families import FAMILIES
from sftplay.plan.shape import ModelShape
from sftplay.plan.shape_from_config import LAYERED, shape_from_config

# transformers' modeling_gpt_bigcode.py compiles three small functions when it is imported.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")

LAYER_KEYS = ("num_hidden_layers", "n_layer", "num_layers")
OWN_CODE = ("qwen", "internlm2")  # families without a class in transformers


def distinct() -> list[str]:
    """One name of the table for each shape that transformers can build."""
    found: dict[str, str] = {}
    for name, config in read_table().items():
        kind = config["model_type"]
        if kind not in OWN_CODE and (kind in FAMILIES or "text_config" in config) and kind not in LAYERED - {"gpt_oss"}:
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
    assert set(FAMILIES) - set(OWN_CODE) <= built | {kind for kind, _ in OF_SEVERAL_KINDS}


SEVERAL = {**LLAMA, "num_hidden_layers": 8, "head_dim": 16}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 8}
MIXED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SHARED = {"shared_expert_intermediate_size": 40}
PLAIN_INPUT = {"hidden_size_per_layer_input": 0}
OF_SEVERAL_KINDS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_5_text", SEVERAL | DELTA),
    ("qwen3_5_text", SEVERAL | DELTA | {"attention_bias": True, "tie_word_embeddings": True}),
    ("qwen3_5_text", SEVERAL | DELTA | {"layer_types": ["full_attention", "linear_attention"] * 4}),
    ("qwen3_5_moe_text", SEVERAL | DELTA | MIXED | SHARED),
    ("qwen3_next", SEVERAL | DELTA | MIXED | SHARED),
    ("gemma4_text", SEVERAL | {"vocab_size_per_layer_input": 100}),
    (
        "gemma4_text",
        SEVERAL | PLAIN_INPUT | {"global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
    ),
    (
        "gemma4_text",
        SEVERAL
        | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 100, "num_kv_shared_layers": 3}
        | {"use_double_wide_mlp": True, "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 2},
    ),
    (
        "gemma4_text",
        SEVERAL | PLAIN_INPUT | MIXED | {"enable_moe_block": True, "top_k_experts": 2, "attention_bias": True},
    ),
    (
        "glm4_moe",
        SEVERAL | {"n_routed_experts": 4, "moe_intermediate_size": 24, "n_shared_experts": 2, "use_qk_norm": True}
        | {"first_k_dense_replace": 3, "attention_bias": True},
    ),
    ("glm4_moe", SEVERAL | {"n_routed_experts": 4, "moe_intermediate_size": 24}),
    ("gpt_oss", SEVERAL | {"num_local_experts": 4}),
    ("qwen3_moe", SEVERAL | MIXED),
    ("ministral3", SEVERAL),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "config"), OF_SEVERAL_KINDS, ids=lambda part: part if isinstance(part, str) else "")
def test_layers_of_several_kinds_are_counted_as_transformers_builds_them_and_pairs_as_peft_adds_them(kind, config):
    shape, model = shape_from_config({"model_type": kind, **config}, name="x"), build({"model_type": kind, **config})
    assert shape.total_params == count(model)
    head = model.get_output_embeddings()
    linears = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
    assert shape.linear_params == sum(m.weight.numel() for m in linears)
    assert sum(part.layers for part in shape.kinds) == shape.layers == config["num_hidden_layers"]
    for layer, module in enumerate(layers_of(model)):
        kinds = [part for part in shape.kinds if sum(one.inputs * one.outputs for one in part.linears)
                 + part.layer_other_params == count(module)]  # fmt: skip
        assert any(part.starts_at <= layer for part in kinds)
    experts = [p for name, p in model.named_parameters() if p.ndim == 3 and "experts" in name]
    assert sum(part.layers * part.routed.params for part in shape.kinds if part.routed) == sum(
        p.numel() for p in experts if kind != "qwen3_moe"
    )
    assert shape.state_leaks == (kind in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"))
    with torch.device("meta"):
        adapted = get_peft_model(model, LoraConfig(r=4, target_modules=every_linear_of_text(model)))
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    setup = MemorySetup(weight_bytes=2, compute_bytes=2, stream_bytes=2, adapter=Adapter(rank=4))
    assert trained_params(shape, setup) == trained


@pytest.mark.parametrize("kind", ["glm4_moe", "qwen3_moe"])
def test_an_adapter_on_all_linears_gives_no_expert_a_pair_that_the_plan_does_not_count(kind):
    """PEFT takes gate_proj for the name of an expert's layer in transformers 4, and passes over such a linear."""
    config = {"model_type": kind, **SEVERAL, **MIXED, "n_routed_experts": 4}
    model = build(config)
    assert names_of_experts(model) >= {"gate_proj", "up_proj", "down_proj"}
    with torch.device("meta"):
        adapted = get_peft_model(model, LoraConfig(r=4, target_modules=every_linear_of_text(model)))
    trained = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert trained
    assert not [name for name in trained if "mlp" in name]


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
