"""The shape of a model by its config.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from sftplay.plan.config_json import AS_PUBLISHED, LARGEST, MIXTURES, ConfigJson, open_config, quote_value
from sftplay.plan.shape import Linear, ModelShape, shortest_repeat

LAYERED = frozenset({"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "gemma4_text", "glm4_moe", "gpt_oss"})
"""Families whose layers are of several kinds, or have experts whose memory is counted (`plan/layered_shape.py`)."""

EXPERTS_NAMED = frozenset({"glm4_moe", "mixtral", "olmoe", "qwen3_moe", "qwen3_next"})
"""Families in which PEFT takes names of linears for those of experts (peft 0.21, `_convert_peft_config_moe`)."""

EXPERT_LINEARS = ("gate_proj", "up_proj", "down_proj")
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


def shape_from_config(config: Mapping[str, Any], *, name: str) -> ModelShape:
    """Read the shape of the (text) model that `config`, the content of a config.json, describes.

    Messages call it `name`. An unknown `model_type` is read as a Llama of the same sizes, and `unmodelled` says so.

    Raises:
        ConfigError: a key that is needed is missing, no number, or out of bounds; the model is no decoder.
    """
    text = open_config(config, name)
    if text.model_type in LAYERED:
        from sftplay.plan.layered_shape import layered_shape

        return layered_shape(text, plain_shape(text, name=name))
    return plain_shape(text, name=name)


def known_or_built(config: Any, *, name: str) -> ModelShape:
    """Read the shape by the table of families, or as transformers builds the model where no family is known."""
    text = open_config(config, name)
    if text.is_known and not text.has_towers:
        return shape_from_config(config, name=name)
    from sftplay.plan.built_shape import built_shape, can_build

    built = built_shape(config, name=name) if can_build(text) else None
    return built or shape_from_config(config, name=name)


def plain_shape(text: ConfigJson, *, name: str) -> ModelShape:
    """Read the shape of a model whose layers are all alike."""
    family = text.family
    hidden = text.count("hidden")
    heads, kv_heads, head_dim = _count_heads(text, hidden)
    layers = text.count("layers")
    if text.model_type in MIXTURES:
        experts = text.count("experts")
    else:
        most = 0 if text.is_known else max(text.whole(key, smallest=0) or 0 for key in EXPERT_KEYS)
        experts = most if most > 1 else 0
    mlp = _mlp_width(text, hidden, experts=experts)
    vocab = text.count("vocab")
    query, keys = heads * head_dim, kv_heads * head_dim
    linears = _attention(text, hidden, query=query, keys=keys)
    linears += _mlp(text, hidden, width=mlp, experts=experts)
    if text.model_type in EXPERTS_NAMED:
        linears = tuple(replace(one, is_left_out=one.name in EXPERT_LINEARS) for one in linears)
    given = [values.get("tie_word_embeddings") for values in (text.outer, text.values)]
    tied = text.check_flag("tie_word_embeddings", next((v for v in given if v is not None), family.tied))
    norms = family.norms
    if family.norms_when_parallel is not None and text.flag(family.parallel):
        # Falcon 40B against Falcon 7B
        two = 2 if text.flag("new_decoder_architecture") else family.norms_when_parallel
        norms = text.whole("num_ln_in_parallel_attn", largest=2) or two
    other = sum(linear.outputs for linear in linears if linear.bias) + norms * family.norm_vectors * hidden
    has_qk_norm = text.flag(family.qk_norm)
    if has_qk_norm:
        other += family.qk_norm_vectors * (2 * head_dim if family.qk_norm_of == "head" else query + keys)
    other += experts * (3 if family.gated else 2) * hidden * mlp + experts * hidden  # and the router
    if family.expert_biases:
        other += experts * (2 * mlp + hidden + 1) + heads
    vision: int | None = 0
    if text.outer is not text.values:
        from sftplay.plan.layered_shape import count_vision

        vision = count_vision(text, hidden)
    window_key = text.key("sliding_window")
    has_window = not text.is_off(window_key) and text.raw("use_sliding_window") is not False
    return ModelShape(
        name=name, family=text.model_type, layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads,
        head_dim=head_dim, mlp=mlp, vocab=vocab, max_positions=text.optional("max_positions"), tied=tied,
        gated_mlp=family.gated, linears=linears, layer_other_params=other,
        other_params=_count_outside(text, hidden, vocab=vocab, tied=tied), norm=family.norm, norms_per_layer=norms,
        qk_norm=has_qk_norm, activation=text.word(text.key("activation"), "silu"),
        parallel_block=text.flag(family.parallel),
        softcap_final=not text.is_off("final_logit_softcapping"),
        softcap_attn=not text.is_off("attn_logit_softcapping"),
        sliding_window=(text.whole(window_key, smallest=0) or None) if has_window else None,
        layer_pattern=_pattern(text), experts=experts, vision_params=vision or 0,
        adds_router_loss=text.raw("output_router_logits") is True,
        unmodelled=tuple(_unmodelled(text, experts=experts, vision=vision)),
    )  # fmt: skip


def _count_heads(text: ConfigJson, hidden: int) -> tuple[int, int, int]:
    """Heads of queries, heads of keys and values, and the width of a head."""
    heads = text.count("heads")
    kv_heads = 1
    if not text.flag("multi_query") or text.flag("new_decoder_architecture"):
        kv_heads = text.optional("kv_heads") or heads
    if heads % kv_heads:
        what = f"is {kv_heads}, which does not divide {text.key('heads')}={heads}"
        raise text.error(text.key("kv_heads"), what, fix=AS_PUBLISHED)
    head_dim = text.optional("head_dim")
    if head_dim is None and hidden % heads:
        what = f"is {hidden}, which {text.key('heads')}={heads} does not divide"
        raise text.error(text.key("hidden"), what, fix=AS_PUBLISHED)
    return heads, kv_heads, head_dim or hidden // heads


def _mlp_width(text: ConfigJson, hidden: int, *, experts: int) -> int:
    """Width between up and down projection; of one expert in a mixture."""
    if text.family.mlp_is_four_hidden and text.optional("mlp") is None:
        return 4 * hidden
    if not experts:
        return max(1, text.count("mlp") // text.family.mlp_divisor)
    width = None if text.is_known else text.whole("moe_intermediate_size")
    return width or text.count("expert_mlp")


def _attention(text: ConfigJson, hidden: int, *, query: int, keys: int) -> tuple[Linear, ...]:
    family = text.family
    bias = text.flag(family.qkv_bias)
    *inward, outward = family.attention
    # OPT lists keys and values before queries; a plan does not care which is which where all are alike.
    widths = [query + 2 * keys] if len(inward) == 1 else [query, keys, keys]
    made = [Linear(name=n, inputs=hidden, outputs=w, bias=bias) for n, w in zip(inward, widths, strict=True)]
    return (*made, Linear(name=outward, inputs=query, outputs=hidden, bias=text.flag(family.out_bias)))


def _mlp(text: ConfigJson, hidden: int, *, width: int, experts: int) -> tuple[Linear, ...]:
    """The MLP's linears; of a mixture only a shared expert's, as the others are no linears in transformers."""
    family, bias = text.family, text.flag(text.family.mlp_bias)
    extra: tuple[Linear, ...] = ()
    if experts:
        shared = text.optional("shared_mlp")
        if shared is None:
            return ()
        width = shared
        extra = (Linear(name="shared_expert_gate", inputs=hidden, outputs=1, is_mlp=True),)
    *inward, outward = family.mlp
    up = 2 * width if family.gated and len(inward) == 1 else width
    made = [Linear(name=name, inputs=hidden, outputs=up, bias=bias, is_mlp=True) for name in inward]
    return (*made, Linear(name=outward, inputs=width, outputs=hidden, bias=bias, is_mlp=True), *extra)


def _count_outside(text: ConfigJson, hidden: int, *, vocab: int, tied: bool) -> int:
    """Parameters outside the layers."""
    family = text.family
    embedding = text.whole("word_embed_proj_dim") or hidden
    total = vocab * embedding * (1 if tied else 2) + (0 if embedding == hidden else 2 * embedding * hidden)
    if family.position_rows is not None:
        total += (text.count("max_positions") + family.position_rows) * hidden
    # Two keys of OPT: its 350m has no norm at the end.
    ends_with_norm = text.raw("do_layer_norm_before") is not False and text.raw("_remove_final_layer_norm") is not True
    norms = (ends_with_norm + family.embedding_norm) * family.norm_vectors * hidden
    return total + (vocab if family.head_bias else 0) + norms


def _pattern(text: ConfigJson) -> int:
    """After how many layers their kinds repeat."""
    kinds = text.raw("layer_types")
    if isinstance(kinds, list) and 0 < len(kinds) <= LARGEST["layers"]:
        return shortest_repeat(kinds)
    return text.optional("pattern") or text.family.pattern


def _unmodelled(text: ConfigJson, *, experts: int, vision: int | None) -> Iterator[str]:
    if not text.is_known:
        yield f"the architecture {quote_value(text.model_type)}, read as a Llama of the same sizes"
    if experts:
        yield "a mixture of experts: routing, and what the experts keep for the backward pass"
    if experts and (text.raw("mlp_only_layers") or (text.whole("decoder_sparse_step") or 1) > 1):
        yield "layers without experts between those with"
    if vision is None:
        yield "the parts for images or sound"
    kinds = text.raw("layer_types")
    named = {kind for kind in kinds if isinstance(kind, str)} if isinstance(kinds, list) else set()
    if odd := sorted(named - {"full_attention", "sliding_attention"}):
        yield f"layers of another kind: {', '.join(odd)}"
    if text.raw("kv_lora_rank") is not None:
        yield "latent attention (kv_lora_rank)"
    if (text.whole("word_embed_proj_dim") or text.raw("hidden_size")) != text.raw("hidden_size"):
        yield "an embedding narrower than the layers"
    if text.outer.get("quantization_config") or text.values.get("quantization_config"):
        yield "weights that are published already quantised"
