"""The families of models that are trained less often."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sftplay.plan.shape import Family

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

_LOCAL_EXPERTS: dict[str, Any] = {
    "keys": {"experts": "num_local_experts"}, "also": {"num_local_experts": "num_experts"}
}  # fmt: skip
_SHARED_MLP = {"mlp": "shared_expert_intermediate_size"}
_QWEN_MIXTURE = {"head_dim": 256, "shared_expert_intermediate_size": 512}

FAMILIES: Mapping[str, Family] = {
    "ministral": Family(defaults=_WINDOW),
    "ministral3": Family(),
    "qwen": Family(
        keys={"head_dim": "kv_channels", "max_positions": "seq_length"}, defaults={"hidden_act": "silu"},
        attention=("c_attn", "c_proj"), mlp=("w1", "w2", "c_proj"), mlp_divisor=2, qkv_bias=True,
    ),
    "gemma": Family(defaults={"head_dim": 256, "hidden_act": "gelu_pytorch_tanh"}, **_GEMMA),
    "gemma2": Family(
        keys={"activation": "hidden_activation"},
        defaults={**_GELU_TANH, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0}, norms=4, pattern=2,
        **_GEMMA,
    ),
    "phi": Family(
        defaults={"hidden_act": "gelu_new"}, attention=(*_QKV, "dense"), mlp=("fc1", "fc2"), **_ALL_BIASED,
        head_bias=True, norms=1, parallel=True, qk_norm="qk_layernorm", qk_norm_vectors=2, **_PLAIN_LAYER_NORM,
    ),
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
    "mixtral": Family(**_LOCAL_EXPERTS),
    "gpt_oss": Family(
        defaults={"head_dim": 64, "sliding_window": 128, "attention_bias": True}, pattern=2, expert_biases=True,
        **_LOCAL_EXPERTS, **_ATTENTION_BIAS,
    ),
    "glm4_moe": Family(
        also={"n_routed_experts": "num_local_experts"}, qk_norm="use_qk_norm", qkv_bias="attention_bias",
    ),
    "qwen3_next": Family(keys=_SHARED_MLP, defaults=_QWEN_MIXTURE, qk_norm=True, **_ATTENTION_BIAS),
    "qwen3_5_text": Family(defaults={"head_dim": 256}, qk_norm=True, **_ATTENTION_BIAS),
    "qwen3_5_moe_text": Family(keys=_SHARED_MLP, defaults=_QWEN_MIXTURE, qk_norm=True, **_ATTENTION_BIAS),
    "gemma4_text": Family(
        keys={"activation": "hidden_activation"},
        defaults={"hidden_activation": "gelu_pytorch_tanh", "head_dim": 256, "sliding_window": 512}, norms=4,
        qk_norm=True, pattern=6, **_GEMMA,
    ),
    "olmoe": Family(also={"num_experts": "num_local_experts"}, qk_norm=True, qk_norm_of="width", **_ATTENTION_BIAS),
    "qwen2_moe": Family(
        keys={"expert_mlp": "moe_intermediate_size"}, defaults={"use_sliding_window": False, "qkv_bias": True},
        qkv_bias="qkv_bias",
    ),
    "qwen3_moe": Family(
        keys={"expert_mlp": "moe_intermediate_size"}, also={"num_experts": "num_local_experts"},
        defaults={"use_sliding_window": False}, qk_norm=True, **_ATTENTION_BIAS,
    ),
}  # fmt: skip
"""All families. A type that is not here is read as a Llama, and that is said."""

ENCODERS = frozenset({
    "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "rembert",
    "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod",
})  # fmt: skip
"""Families that `AutoModelForCausalLM` opens as encoders where their config does not say `is_decoder`."""

NEITHER = {
    "big_bird", "bigbird_pegasus", "bloom", "codegen", "cpmant", "deepseek_v4", "falcon_mamba", "git",
    "got_ocr2", "gpt_neox_japanese", "hy_v4", "inkling2_text", "mamba", "mamba2", "megatron-bert", "mpt", "mvp",
    "openai-gpt", "prophetnet", "reformer", "rembert", "roformer", "rwkv", "trocr", "xglm", "xlm", "xlnet",
    "xlstm",
}  # fmt: skip
WITHOUT_SDPA = NEITHER | {
    "flint", "gemma2", "gpt_neo", "gpt_oss", "gptj", "granite_swa", "granitemoe_swa", "mimo_v2_flash",
    "vaultgemma",
}  # fmt: skip
WITHOUT_FLASH = NEITHER | {
    "axk2", "blt", "deepseek_v32", "doge", "dots3_note", "dots3_note_text", "glm_moe_dsa", "inkling_text",
    "llama4", "llama4_text", "minimax_m3_vl_text", "mllama", "qwen4_exp", "qwen4_exp_text",
}  # fmt: skip
"""Families whose class has no such attention (transformers 5.23, `_supports_sdpa`, `_supports_flash_attn`)."""


def missing_attention(family: str) -> set[str]:
    """Return the values of model.attn that the class of a family does not have."""
    lists = {"sdpa": WITHOUT_SDPA, "flash_attention_2": WITHOUT_FLASH}
    return {attention for attention, families in lists.items() if family in families}
