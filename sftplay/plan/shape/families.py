"""How each family of models spells its config.json and builds its layers: the words, and one literal table.

Names, biases and defaults are those of transformers 5.17 (each family's modeling and configuration file); for families
that run from their repository's own code (qwen, internlm2) they are from that code. Nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Flag = bool | str  # true, False, or the config.json key that decides


@dataclass(frozen=True, kw_only=True)
class Family:
    """What the config.json of a family leaves unsaid. The defaults describe a Llama."""

    keys: Mapping[str, str] = field(default_factory=dict)  # word of `KEYS` -> this family's spelling, where it differs
    # Values of keys that published files of the family leave out: its configuration class has them.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    # Four names, or two when queries, keys and values come from one projection.
    attention: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    # Three names, or two: then the first one is gate and up together if `gated`, else up alone.
    mlp: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    gated: bool = True
    qkv_bias: Flag = False
    out_bias: Flag = False
    mlp_bias: Flag = False
    head_bias: bool = False
    tied: bool = False  # whether the head shares the embedding when config.json does not say
    norm: Literal["rms", "layer"] = "rms"
    norm_vectors: int = 1  # trained vectors of a norm: 0, 1 (weight) or 2 (and bias)
    norms: int = 2
    norms_when_parallel: int | None = None  # norms in a layer whose attention and MLP are parallel; None means `norms`
    embedding_norm: bool = False
    qk_norm: Flag = False
    qk_norm_of: Literal["head", "width"] = "head"  # A norm's length: one head shared by all, or all heads side by side
    qk_norm_vectors: int = 1
    parallel: Flag = False
    position_rows: int | None = None  # None without learned positions, else the rows beyond `max_positions`
    mlp_is_four_hidden: bool = False  # True when a missing width of the MLP means four times `hidden`
    mlp_divisor: int = 1  # what the config's width is divided by: a legacy Qwen writes gate and up together
    pattern: int = 1  # layers after which kinds of attention repeat, when config.json does not say


KEYS: Mapping[str, str] = {
    "layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "head_dim": "head_dim", "mlp": "intermediate_size", "vocab": "vocab_size",
    "max_positions": "max_position_embeddings", "activation": "hidden_act", "sliding_window": "sliding_window",
    "pattern": "sliding_window_pattern", "experts": "num_experts", "expert_mlp": "intermediate_size",
    "shared_mlp": "shared_expert_intermediate_size",
}  # fmt: skip
"""Our word -> the key most families use."""


_GPT2_KEYS = {
    "layers": "n_layer", "hidden": "n_embd", "heads": "n_head", "mlp": "n_inner", "max_positions": "n_positions",
    "activation": "activation_function",
}  # fmt: skip
_GELU_NEW = {"activation_function": "gelu_new"}
_QKV = ("q_proj", "k_proj", "v_proj")
_NEOX = ("query_key_value", "dense")
_NEOX_MLP = ("dense_h_to_4h", "dense_4h_to_h")
_LLAMA_BIAS: dict[str, Any] = {"qkv_bias": "attention_bias", "out_bias": "attention_bias", "mlp_bias": "mlp_bias"}
_ALL_BIASED: dict[str, Any] = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
_USE_BIAS: dict[str, Any] = {"qkv_bias": "use_bias", "out_bias": "use_bias", "mlp_bias": "use_bias"}
_ATTENTION_BIAS: dict[str, Any] = {"qkv_bias": "attention_bias", "out_bias": "attention_bias"}
_PLAIN_LAYER_NORM: dict[str, Any] = {"norm": "layer", "norm_vectors": 2, "gated": False}
_GEMMA: dict[str, Any] = {"tied": True, **_ATTENTION_BIAS}

_GLM: dict[str, Any] = {
    "defaults": {"head_dim": 128, "attention_bias": True}, "mlp": ("gate_up_proj", "down_proj"),
    "qkv_bias": "attention_bias",
}  # fmt: skip
_WINDOW = {"sliding_window": 4096}
_GELU_TANH = {**_WINDOW, "hidden_activation": "gelu_pytorch_tanh", "head_dim": 256}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(**_LLAMA_BIAS),
    "mistral": Family(defaults=_WINDOW),
    "ministral": Family(defaults=_WINDOW),
    "ministral3": Family(),
    "qwen": Family(
        keys={"head_dim": "kv_channels", "max_positions": "seq_length"}, defaults={"hidden_act": "silu"},
        attention=("c_attn", "c_proj"), mlp=("w1", "w2", "c_proj"), mlp_divisor=2, qkv_bias=True,
    ),
    "qwen2": Family(defaults={"use_sliding_window": False}, qkv_bias=True),
    "qwen3": Family(defaults={"use_sliding_window": False, "head_dim": 128}, qk_norm=True, **_ATTENTION_BIAS),
    "gemma": Family(defaults={"head_dim": 256, "hidden_act": "gelu_pytorch_tanh"}, **_GEMMA),
    "gemma2": Family(
        keys={"activation": "hidden_activation"},
        defaults={**_GELU_TANH, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0}, norms=4, pattern=2,
        **_GEMMA,
    ),
    "gemma3_text": Family(
        keys={"activation": "hidden_activation"},
        defaults={**_GELU_TANH, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262_208,
                  "max_position_embeddings": 131_072},
        norms=4, qk_norm=True, pattern=6, **_GEMMA,
    ),
    "phi": Family(
        defaults={"hidden_act": "gelu_new"}, attention=(*_QKV, "dense"), mlp=("fc1", "fc2"), **_ALL_BIASED,
        head_bias=True, norms=1, parallel=True, qk_norm="qk_layernorm", qk_norm_vectors=2, **_PLAIN_LAYER_NORM,
    ),
    "phi3": Family(attention=("qkv_proj", "o_proj"), mlp=("gate_up_proj", "down_proj")),
    "smollm3": Family(defaults={"use_sliding_window": False}, tied=True, **_LLAMA_BIAS),
    "granite": Family(**_LLAMA_BIAS),
    "seed_oss": Family(
        defaults={"head_dim": 128, "attention_bias": True}, qkv_bias="attention_bias", out_bias="attention_out_bias",
        mlp_bias="mlp_bias",
    ),
    "helium": Family(defaults={"head_dim": 128}, qkv_bias="attention_bias", mlp_bias="mlp_bias"),
    "hunyuan_v1_dense": Family(qk_norm=True, **_ATTENTION_BIAS),
    "exaone4": Family(defaults=_WINDOW, qk_norm=True, pattern=4),
    "ernie4_5": Family(defaults={"head_dim": 128}, tied=True, **_USE_BIAS),
    "olmo": Family(norm="layer", norm_vectors=0, **_ATTENTION_BIAS),
    "olmo2": Family(qk_norm=True, qk_norm_of="width", **_ATTENTION_BIAS),
    "olmo3": Family(defaults=_WINDOW, qk_norm=True, qk_norm_of="width", pattern=4, **_ATTENTION_BIAS),
    "glm": Family(**_GLM),
    "glm4": Family(norms=4, **_GLM),
    "arcee": Family(mlp=("up_proj", "down_proj"), gated=False, defaults={"hidden_act": "relu2"}, **_LLAMA_BIAS),
    "nemotron": Family(
        mlp=("up_proj", "down_proj"), defaults={"hidden_act": "relu2"}, **_PLAIN_LAYER_NORM, **_LLAMA_BIAS,
    ),
    "starcoder2": Family(
        defaults={"use_bias": True, "hidden_act": "gelu_pytorch_tanh"}, mlp=("c_fc", "c_proj"), tied=True, **_USE_BIAS,
        **_PLAIN_LAYER_NORM,
    ),
    "stablelm": Family(
        norm="layer", norm_vectors=2, qkv_bias="use_qkv_bias", qk_norm="qk_layernorm", qk_norm_of="width",
        parallel="use_parallel_residual", norms_when_parallel=1,
    ),
    "cohere": Family(
        norm="layer", tied=True, norms=1, parallel=True, qk_norm="use_qk_norm", qk_norm_of="width", **_ATTENTION_BIAS,
    ),
    "cohere2": Family(defaults=_WINDOW, norm="layer", tied=True, norms=1, parallel=True, pattern=4, **_ATTENTION_BIAS),
    "gpt2": Family(
        keys=_GPT2_KEYS, defaults=_GELU_NEW, attention=("c_attn", "c_proj"), mlp=("c_fc", "c_proj"), tied=True,
        **_ALL_BIASED, position_rows=0, mlp_is_four_hidden=True, **_PLAIN_LAYER_NORM,
    ),
    "gpt_bigcode": Family(
        keys=_GPT2_KEYS, defaults={"multi_query": True, "activation_function": "gelu_pytorch_tanh"},
        attention=("c_attn", "c_proj"), mlp=("c_fc", "c_proj"), tied=True, **_ALL_BIASED, position_rows=0,
        mlp_is_four_hidden=True, **_PLAIN_LAYER_NORM,
    ),
    "gpt_neo": Family(
        keys={"layers": "num_layers", "heads": "num_heads", "activation": "activation_function",
              "sliding_window": "window_size"},
        defaults=_GELU_NEW, attention=("q_proj", "k_proj", "v_proj", "out_proj"), mlp=("c_fc", "c_proj"), tied=True,
        out_bias=True, mlp_bias=True, position_rows=0, mlp_is_four_hidden=True, pattern=2, **_PLAIN_LAYER_NORM,
    ),
    "gptj": Family(
        keys=_GPT2_KEYS, defaults=_GELU_NEW, attention=(*_QKV, "out_proj"), mlp=("fc_in", "fc_out"), mlp_bias=True,
        head_bias=True, norms=1, parallel=True, mlp_is_four_hidden=True, **_PLAIN_LAYER_NORM,
    ),
    "gpt_neox": Family(
        defaults={"attention_bias": True, "use_parallel_residual": True, "hidden_act": "gelu"}, attention=_NEOX,
        mlp=_NEOX_MLP, mlp_bias=True, parallel="use_parallel_residual", **_ATTENTION_BIAS, **_PLAIN_LAYER_NORM,
    ),
    "bloom": Family(
        keys={"layers": "n_layer", "heads": "n_head", "max_positions": "seq_length"}, defaults={"hidden_act": "gelu"},
        attention=_NEOX, mlp=_NEOX_MLP, tied=True, **_ALL_BIASED, embedding_norm=True, mlp_is_four_hidden=True,
        **_PLAIN_LAYER_NORM,
    ),
    "falcon": Family(
        keys={"kv_heads": "num_kv_heads", "mlp": "ffn_hidden_size", "activation": "activation"},
        defaults={"multi_query": True, "parallel_attn": True, "activation": "gelu", "max_position_embeddings": 2048},
        attention=_NEOX, mlp=_NEOX_MLP, tied=True, qkv_bias="bias", out_bias="bias", mlp_bias="bias",
        parallel="parallel_attn", norms_when_parallel=1, mlp_is_four_hidden=True, **_PLAIN_LAYER_NORM,
    ),
    "opt": Family(
        keys={"mlp": "ffn_dim", "activation": "activation_function"},
        defaults={"enable_bias": True, "activation_function": "relu"},
        attention=("k_proj", "v_proj", "q_proj", "out_proj"), mlp=("fc1", "fc2"), tied=True, qkv_bias="enable_bias",
        out_bias="enable_bias", mlp_bias="enable_bias", position_rows=2, **_PLAIN_LAYER_NORM,
    ),
    "internlm2": Family(attention=("wqkv", "wo"), mlp=("w1", "w3", "w2"), qkv_bias="bias", out_bias="bias"),
    "mixtral": Family(keys={"experts": "num_local_experts"}),
    "olmoe": Family(qk_norm=True, qk_norm_of="width", **_ATTENTION_BIAS),
    "qwen2_moe": Family(
        keys={"expert_mlp": "moe_intermediate_size"}, defaults={"use_sliding_window": False, "qkv_bias": True},
        qkv_bias="qkv_bias",
    ),
    "qwen3_moe": Family(
        keys={"expert_mlp": "moe_intermediate_size"}, defaults={"use_sliding_window": False}, qk_norm=True,
        **_ATTENTION_BIAS,
    ),
}  # fmt: skip
"""`model_type` of the text model -> its family. A type that is not here is read as a Llama, and that is said."""

MIXTURES = frozenset({"mixtral", "olmoe", "qwen2_moe", "qwen3_moe"})
"""Families whose MLP is a mixture of experts in every layer."""
