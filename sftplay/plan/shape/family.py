"""The words in which a family of models is described: how it spells its config.json and builds its layers.

The descriptions themselves stand in `families`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Flag = bool | str
"""True, False, or the config.json key that decides."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """What the config.json of a family leaves unsaid. The defaults describe a Llama."""

    keys: Mapping[str, str] = field(default_factory=dict)
    """Word of `KEYS` -> this family's spelling, where it differs."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of keys that published files of the family leave out: its configuration class has them."""

    attention: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    """Four names, or two when queries, keys and values come from one projection."""

    mlp: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    """Three names, or two: then the first one is gate and up together if `gated`, else up alone."""

    gated: bool = True
    qkv_bias: Flag = False
    out_bias: Flag = False
    mlp_bias: Flag = False
    head_bias: bool = False
    tied: bool = False
    """Whether the head shares the embedding when config.json does not say."""

    norm: Literal["rms", "layer"] = "rms"
    norm_vectors: int = 1
    """Trained vectors of a norm: 0, 1 (weight) or 2 (and bias)."""

    norms: int = 2
    norms_when_parallel: int | None = None
    """Norms in a layer whose attention and MLP are parallel; None means `norms`."""

    embedding_norm: bool = False
    qk_norm: Flag = False
    qk_norm_of: Literal["head", "width"] = "head"
    """A norm's length: one head shared by all, or all heads side by side."""

    qk_norm_vectors: int = 1
    parallel: Flag = False
    position_rows: int | None = None
    """None without learned positions, else the rows beyond `max_positions`."""

    mlp_is_four_hidden: bool = False
    """True when a missing width of the MLP means four times `hidden`."""

    mlp_divisor: int = 1
    """What the config's width is divided by: a legacy Qwen writes gate and up together."""

    pattern: int = 1
    """Layers after which kinds of attention repeat, when config.json does not say."""

    unmodelled: tuple[str, ...] = ()


KEYS: Mapping[str, str] = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mlp": "intermediate_size",
    "vocab": "vocab_size",
    "max_positions": "max_position_embeddings",
    "activation": "hidden_act",
    "sliding_window": "sliding_window",
    "pattern": "sliding_window_pattern",
    "experts": "num_experts",
    "expert_mlp": "intermediate_size",
    "shared_mlp": "shared_expert_intermediate_size",
}
"""Our word -> the key most families use."""
