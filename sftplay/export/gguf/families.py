"""The architectures that are written as GGUF: names of their tensors, hyperparameters, what llama.cpp expects of both.

llama.cpp computes a family's graph from its own code: a value that this code has no key for must be the one it assumes,
so every other value is refused by name. Sources: `src/models/*.cpp` and `conversion/*.py` of
https://github.com/ggml-org/llama.cpp, and the tables of the package `gguf`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import gguf
import torch
from torch import Tensor

from sftplay.errors import ConfigError

OWN_CONVERTER = "name a checkout of llama.cpp, whose converter may know it: LLAMA_CPP=folder"


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture of transformers as llama.cpp computes it."""

    arch: str
    """llama.cpp's name."""

    permutes: bool = False
    """llama.cpp rotates neighbouring pairs, transformers the two halves of a head: rows of q and k change places."""

    assumes: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Attribute of the config -> the values that llama.cpp's graph computes."""

    norm_offset: float = 0.0
    """What transformers adds to the weight of a norm before it multiplies."""


_SILU = ("silu", "swish")
_QWEN = {"hidden_act": _SILU, "use_sliding_window": (False, None)}
_UNBIASED = {"attention_bias": (False, None)}
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(arch="llama", permutes=True, assumes={"hidden_act": _SILU}),
    "MistralForCausalLM": Family(arch="llama", permutes=True, assumes={"hidden_act": _SILU}),
    "Qwen2ForCausalLM": Family(arch="qwen2", assumes=_QWEN),
    "Qwen3ForCausalLM": Family(arch="qwen3", assumes=_QWEN | _UNBIASED),
    "Qwen3MoeForCausalLM": Family(
        arch="qwen3moe",
        assumes=_QWEN
        | _UNBIASED
        | {"norm_topk_prob": (True,), "decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},
    ),
    "Gemma3ForCausalLM": Family(
        arch="gemma3",
        norm_offset=1.0,
        assumes=_UNBIASED
        | {
            "hidden_activation": ("gelu_pytorch_tanh",),
            "attn_logit_softcapping": (None,),
            "final_logit_softcapping": (None,),
            "use_bidirectional_attention": (False, None),
        },
    ),
}
"""Class of the model -> how it is written. Each one is held by tests/export/test_gguf_families.py."""


def find_family(model: Any) -> Family:
    """Return the model's family. Raise ConfigError for an unknown architecture, and for a value that llama.cpp would
    not compute."""
    name = type(model).__name__
    family = FAMILIES.get(name)
    if family is None:
        known = ", ".join(known.removesuffix("ForCausalLM") for known in FAMILIES)
        what = f"{name} is not among the architectures that are proven as GGUF: {known}"
        raise ConfigError(what, where="--format gguf", fix=OWN_CONVERTER)
    for key, allowed in family.assumes.items():
        if (value := getattr(model.config, key, allowed[0])) not in allowed:
            expected = " or ".join(map(repr, allowed))
            what = f"its {key} is {value!r}, and llama.cpp computes {family.arch} with {expected}"
            raise ConfigError(what, where=f"{name}'s config.json", fix=OWN_CONVERTER)
    return family


def add_hyperparameters(writer: gguf.GGUFWriter, config: Any, family: Family) -> None:
    """Write the keys that llama.cpp reads for the family. Raise ConfigError where a rope scaling has no key."""
    heads, head_dim = config.num_attention_heads, find_head_dim(config)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(find_context(config))
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if family.arch != "gemma3":
        writer.add_rope_dimension_count(head_dim)
    if family.arch == "qwen3moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    rope = find_rope(config)
    writer.add_rope_freq_base(rope["rope_theta"])
    if family.arch == "gemma3":
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern(_find_period(config))
        writer.add_rope_freq_base_swa(_find_local_rope(config))
    _add_rope_scaling(writer, rope, family)


def find_head_dim(config: Any) -> int:
    """Return the width of a head, which need not be the hidden size over the number of heads."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def find_context(config: Any) -> int:
    """Return the longest context that llama.cpp computes as transformers does.

    Mistral's first models attend to a window, which llama.cpp does not: both agree up to its length.
    """
    longest = int(config.max_position_embeddings)
    is_windowed = config.model_type == "mistral" and config.sliding_window
    return min(longest, int(config.sliding_window)) if is_windowed else longest


def find_rope(config: Any) -> Mapping[str, Any]:
    """Return the rope parameters of layers that attend to everything."""
    rope: Mapping[str, Any] = config.rope_parameters
    return rope.get("full_attention", rope)


def _find_local_rope(config: Any) -> float:
    local = config.rope_parameters["sliding_attention"]
    if local.get("rope_type", "default") != "default":
        what = f"scales the rope of its sliding windows ({local['rope_type']}), and llama.cpp does not"
        raise ConfigError(what, where="rope_parameters", fix=OWN_CONVERTER)
    return float(local["rope_theta"])


def _find_period(config: Any) -> int:
    """Return p where each p-th layer attends to everything and all others to a window."""
    kinds = [kind == "full_attention" for kind in config.layer_types]
    if all(kinds):
        what = "it has no window in any layer, and llama.cpp computes gemma3 with some"
        raise ConfigError(what, where="layer_types", fix=OWN_CONVERTER)
    period = kinds.index(True) + 1 if True in kinds else len(kinds) + 1
    if kinds != [(number + 1) % period == 0 for number in range(len(kinds))]:
        what = f"its layers that attend to everything have no period: {config.layer_types}"
        raise ConfigError(what, where="layer_types", fix=OWN_CONVERTER)
    return period


_YARN = {"rope_type", "rope_theta", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow"}


def _add_rope_scaling(writer: gguf.GGUFWriter, rope: Mapping[str, Any], family: Family) -> None:
    kind = rope.get("rope_type", "default")
    given = {key for key, value in rope.items() if value is not None and (key, value) != ("partial_rotary_factor", 1.0)}
    has_keys = kind in ("default", "linear", "yarn") or (kind == "llama3" and family.arch == "llama")
    strange = given - _YARN if kind == "yarn" else given & {"partial_rotary_factor", "attention_factor"}
    if not has_keys or strange:
        what = f"llama.cpp has no key for this rope of {family.arch}: {dict(rope)}"
        raise ConfigError(what, where="rope_parameters", fix=OWN_CONVERTER)
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope.get("beta_fast") or 32.0)
        writer.add_rope_scaling_yarn_beta_slow(rope.get("beta_slow") or 1.0)


Make = Callable[[], Tensor]


def list_tensors(model: Any, family: Family) -> Iterator[tuple[str, tuple[int, ...], Make]]:
    """Yield llama.cpp's name, shape and a function that makes the values (fp32) of each tensor of the file.

    A head that is the input embedding is left out, as llama.cpp takes the embedding where there is none. Raise
    ConfigError for a tensor that the family has no name for.
    """
    config = model.config
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == family.arch)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    state = model.state_dict()
    head, embedding = state.get("lm_head.weight"), state["model.embed_tokens.weight"]
    for name, tensor in state.items():
        if tensor is head and head.data_ptr() == embedding.data_ptr():
            continue
        if name.endswith("experts.gate_up_proj"):  # [experts, gate and up, hidden]
            width = tensor.shape[1] // 2
            for part, rows in (("gate", slice(0, width)), ("up", slice(width, None))):
                wanted = f"{name.removesuffix('gate_up_proj')}{part}_proj.weight"
                yield _name(names, wanted, family), *_shape_and_values(tensor[:, rows], _keep)
            continue
        wanted = name if name.endswith((".weight", ".bias")) else f"{name}.weight"
        yield _name(names, wanted, family), *_shape_and_values(tensor, _find_change(name, config, family))
    if find_rope(config).get("rope_type") == "llama3":
        factors = _llama3_factors(config)
        yield "rope_freqs.weight", tuple(factors.shape), lambda: factors


def _shape_and_values(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> tuple[tuple[int, ...], Make]:
    return tuple(tensor.shape), lambda: change(tensor.float()).contiguous()


def _keep(values: Tensor) -> Tensor:
    return values


def _name(names: gguf.TensorNameMap, name: str, family: Family) -> str:
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    if found is None:
        what = f"llama.cpp has no name for the tensor {name} of {family.arch}"
        raise ConfigError(what, where="--format gguf", fix=OWN_CONVERTER)
    return found


def _find_change(name: str, config: Any, family: Family) -> Callable[[Tensor], Tensor]:
    """Return what turns transformers' values of the tensor into llama.cpp's."""
    for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
        if family.permutes and f".{part}." in name:
            return lambda values: permute(values, heads)
    if family.norm_offset and name.endswith("norm.weight"):
        scale = _query_scale(config) if "q_norm" in name else 1.0
        return lambda values: (values + family.norm_offset) * scale
    return _keep


def permute(values: Tensor, heads: int) -> Tensor:
    """Return a weight or bias of q or k with the rows of each head in the order (0, n/2, 1, n/2 + 1, ...)."""
    return values.view(heads, 2, -1, *values.shape[1:]).transpose(1, 2).reshape(values.shape)


def _query_scale(config: Any) -> float:
    """Return what makes llama.cpp's scale of gemma3's scores, set by the width of a head, that of this config."""
    width = config.hidden_size / config.num_attention_heads if config.num_hidden_layers == 62 else find_head_dim(config)
    return math.sqrt(width / config.query_pre_attn_scalar)


def _llama3_factors(config: Any) -> Tensor:
    """Return by what each frequency is divided: what transformers computes without scaling over what it computes."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, attention = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    assert attention == 1.0
    width = find_head_dim(config)
    plain = 1.0 / find_rope(config)["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
    return (plain / scaled.double()).float()
