"""What the config.json of a family leaves unsaid; the families that most runs train."""

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
    expert_biases: bool = False  # biases of experts and router, and a learned sink for each head: GPT-OSS
    pattern: int = 1  # layers after which kinds of attention repeat, when config.json does not say


KEYS: Mapping[str, str] = {
    "layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "head_dim": "head_dim", "mlp": "intermediate_size", "vocab": "vocab_size",
    "max_positions": "max_position_embeddings", "activation": "hidden_act", "sliding_window": "sliding_window",
    "pattern": "sliding_window_pattern", "experts": "num_experts", "expert_mlp": "intermediate_size",
    "shared_mlp": "shared_expert_intermediate_size",
}  # fmt: skip
"""Our word -> the key most families use."""

_LLAMA_BIAS: dict[str, Any] = {"qkv_bias": "attention_bias", "out_bias": "attention_bias", "mlp_bias": "mlp_bias"}
_ATTENTION_BIAS: dict[str, Any] = {"qkv_bias": "attention_bias", "out_bias": "attention_bias"}
_GEMMA: dict[str, Any] = {"tied": True, **_ATTENTION_BIAS}

_WINDOW = {"sliding_window": 4096}
_GELU_TANH = {**_WINDOW, "hidden_activation": "gelu_pytorch_tanh", "head_dim": 256}

COMMON: Mapping[str, Family] = {
    "llama": Family(**_LLAMA_BIAS),
    "mistral": Family(defaults=_WINDOW),
    "qwen2": Family(defaults={"use_sliding_window": False}, qkv_bias=True),
    "qwen3": Family(defaults={"use_sliding_window": False, "head_dim": 128}, qk_norm=True, **_ATTENTION_BIAS),
    "gemma3_text": Family(
        keys={"activation": "hidden_activation"},
        defaults={**_GELU_TANH, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262_208,
                  "max_position_embeddings": 131_072},
        norms=4, qk_norm=True, pattern=6, **_GEMMA,
    ),
    "phi3": Family(attention=("qkv_proj", "o_proj"), mlp=("gate_up_proj", "down_proj")),
    "smollm3": Family(defaults={"use_sliding_window": False}, tied=True, **_LLAMA_BIAS),
}  # fmt: skip
"""`model_type` of the text model -> its family; `plan/more_families.py` has the others."""
