"""Turns the content of a config.json into a ModelShape, or says which key cannot be used and why.

Which keys and modules a family has stands in `families`; no file is opened here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sftplay.plan.shape.config_json import AS_PUBLISHED, LARGEST, ConfigJson, open_config, quote_value
from sftplay.plan.shape.families import MIXTURES
from sftplay.plan.shape.model_shape import Linear, ModelShape
from sftplay.plan.shape.vision import count_vision

EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


def shape_from_config(config: Mapping[str, Any], *, name: str) -> ModelShape:
    """The shape of the model that `config`, the content of a config.json, describes; `name` stands for it in messages.

    A multimodal config gives its text model's shape. A `model_type` that the kit does not know is read as a Llama of
    the same sizes, and `unmodelled` says so.

    Raises:
        ConfigError: a key that is needed is missing, no number, or out of bounds; the model is no decoder.
    """
    text = open_config(config, name)
    sizes = _sizes(text)
    linears = _attention(text, sizes) + _mlp(text, sizes)
    tied = _is_tied(text)
    vision = count_vision(text, sizes.hidden)
    experts = _experts(text)
    return ModelShape(
        name=name,
        family=text.model_type,
        layers=sizes.layers,
        hidden=sizes.hidden,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        mlp=sizes.mlp,
        vocab=sizes.vocab,
        max_positions=text.optional("max_positions"),
        tied=tied,
        gated_mlp=text.family.gated,
        linears=linears,
        layer_other_params=_layer_other(text, sizes, linears=linears),
        other_params=_outside(text, sizes, tied=tied),
        norm=text.family.norm,
        norms_per_layer=_norms(text),
        qk_norm=text.flag(text.family.qk_norm),
        activation=text.word(text.key("activation"), "silu"),
        parallel_block=text.flag(text.family.parallel),
        softcap_final=not text.is_off("final_logit_softcapping"),
        softcap_attn=not text.is_off("attn_logit_softcapping"),
        sliding_window=_sliding_window(text),
        layer_pattern=_pattern(text),
        experts=experts,
        vision_params=vision or 0,
        unmodelled=_unmodelled(text, experts=experts, vision=vision),
    )


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int

    @property
    def q(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        return self.kv_heads * self.head_dim


def _sizes(text: ConfigJson) -> _Sizes:
    hidden, heads = text.count("hidden"), text.count("heads")
    kv_heads = _kv_heads(text, heads)
    head_dim = text.optional("head_dim")
    if head_dim is None:
        if hidden % heads:
            key = text.key("hidden")
            raise text.error(key, f"is {hidden}, which {text.key('heads')}={heads} does not divide", fix=AS_PUBLISHED)
        head_dim = hidden // heads
    return _Sizes(
        layers=text.count("layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp=_mlp_width(text, hidden),
        vocab=text.count("vocab"),
    )


def _kv_heads(text: ConfigJson, heads: int) -> int:
    if text.flag("multi_query") and not text.flag("new_decoder_architecture"):
        return 1
    kv_heads = text.optional("kv_heads") or heads
    if heads % kv_heads:
        what = f"is {kv_heads}, which does not divide {text.key('heads')}={heads}"
        raise text.error(text.key("kv_heads"), what, fix=AS_PUBLISHED)
    return kv_heads


def _mlp_width(text: ConfigJson, hidden: int) -> int:
    """Width between up and down projection; of one expert in a mixture."""
    if text.family.mlp_is_four_hidden and text.optional("mlp") is None:
        return 4 * hidden
    if _experts(text):
        if not text.is_known and (width := text.whole("moe_intermediate_size")):
            return width
        return text.count("expert_mlp")
    return max(1, text.count("mlp") // text.family.mlp_divisor)


def _attention(text: ConfigJson, sizes: _Sizes) -> tuple[Linear, ...]:
    family = text.family
    qkv_bias, out_bias = text.flag(family.qkv_bias), text.flag(family.out_bias)
    *inward, outward = family.attention
    # OPT lists keys and values before queries; a plan does not care which is which where all are alike.
    widths = [sizes.q + 2 * sizes.kv] if len(inward) == 1 else [sizes.q, sizes.kv, sizes.kv]
    made = [Linear(name=n, inputs=sizes.hidden, outputs=w, bias=qkv_bias) for n, w in zip(inward, widths, strict=True)]
    return (*made, Linear(name=outward, inputs=sizes.q, outputs=sizes.hidden, bias=out_bias))


def _mlp(text: ConfigJson, sizes: _Sizes) -> tuple[Linear, ...]:
    """The MLP's linears; of a mixture only a shared expert's, as the others are no linears in transformers."""
    width, hidden, family = sizes.mlp, sizes.hidden, text.family
    bias = text.flag(family.mlp_bias)
    extra: tuple[Linear, ...] = ()
    if _experts(text):
        shared = text.optional("shared_mlp")
        if shared is None:
            return ()
        width = shared
        extra = (Linear(name="shared_expert_gate", inputs=hidden, outputs=1, is_mlp=True),)
    *inward, outward = family.mlp
    up = 2 * width if family.gated and len(inward) == 1 else width
    made = [Linear(name=name, inputs=hidden, outputs=up, bias=bias, is_mlp=True) for name in inward]
    return (*made, Linear(name=outward, inputs=width, outputs=hidden, bias=bias, is_mlp=True), *extra)


def _layer_other(text: ConfigJson, sizes: _Sizes, *, linears: tuple[Linear, ...]) -> int:
    family = text.family
    total = sum(linear.outputs for linear in linears if linear.bias)
    total += _norms(text) * family.norm_vectors * sizes.hidden
    if text.flag(family.qk_norm):
        length = 2 * sizes.head_dim if family.qk_norm_of == "head" else sizes.q + sizes.kv
        total += family.qk_norm_vectors * length
    experts = _experts(text)
    router = experts * sizes.hidden
    return total + experts * (3 if family.gated else 2) * sizes.hidden * sizes.mlp + router


def _outside(text: ConfigJson, sizes: _Sizes, *, tied: bool) -> int:
    family, hidden = text.family, sizes.hidden
    embedding = text.whole("word_embed_proj_dim") or hidden
    total = sizes.vocab * embedding + (0 if embedding == hidden else 2 * embedding * hidden)
    if family.position_rows is not None:
        total += (text.count("max_positions") + family.position_rows) * hidden
    if not tied:
        total += sizes.vocab * embedding
    if family.head_bias:
        total += sizes.vocab
    # Two keys of OPT: its 350m has no norm at the end.
    ends_with_norm = text.raw("do_layer_norm_before") is not False and text.raw("_remove_final_layer_norm") is not True
    return total + (ends_with_norm + family.embedding_norm) * family.norm_vectors * hidden


def _norms(text: ConfigJson) -> int:
    family = text.family
    if family.norms_when_parallel is None or not text.flag(family.parallel):
        return family.norms
    two = 2 if text.flag("new_decoder_architecture") else family.norms_when_parallel  # Falcon 40B against Falcon 7B
    return text.whole("num_ln_in_parallel_attn", largest=2) or two


def _is_tied(text: ConfigJson) -> bool:
    for values in (text.outer, text.values):
        value = values.get("tie_word_embeddings")
        if value is None:
            continue
        if not isinstance(value, bool):
            raise text.error(
                "tie_word_embeddings", f"is {quote_value(value)}, neither true nor false", fix="write true or false"
            )
        return value
    return text.family.tied


def _sliding_window(text: ConfigJson) -> int | None:
    key = text.key("sliding_window")
    if text.is_off(key) or text.raw("use_sliding_window") is False:
        return None
    return text.whole(key, smallest=0) or None


def _pattern(text: ConfigJson) -> int:
    """The shortest stretch of layers that repeats itself to the end."""
    kinds = text.raw("layer_types")
    if isinstance(kinds, list) and 0 < len(kinds) <= LARGEST["layers"]:
        return next(n for n in range(1, len(kinds) + 1) if all(kinds[i] == kinds[i - n] for i in range(n, len(kinds))))
    return text.optional("pattern") or text.family.pattern


def _experts(text: ConfigJson) -> int:
    if text.model_type in MIXTURES:
        return text.count("experts")
    if text.is_known:
        return 0
    found = [text.whole(key, smallest=0) or 0 for key in EXPERT_KEYS]
    return max(found) if max(found) > 1 else 0


def _odd_layers(text: ConfigJson) -> list[str]:
    kinds = text.raw("layer_types")
    named = {kind for kind in kinds if isinstance(kind, str)} if isinstance(kinds, list) else set()
    return sorted(named - {"full_attention", "sliding_attention"})


def _unmodelled(text: ConfigJson, *, experts: int, vision: int | None) -> tuple[str, ...]:
    found = []
    if not text.is_known:
        found.append(f"the architecture {quote_value(text.model_type)}, read as a Llama of the same sizes")
    if experts:
        found.append("a mixture of experts: routing, and what the experts keep for the backward pass")
    if experts and (text.raw("mlp_only_layers") or (text.whole("decoder_sparse_step") or 1) > 1):
        found.append("layers without experts between those with")
    if vision is None:
        found.append("the parts for images or sound")
    if odd := _odd_layers(text):
        found.append(f"layers of another kind: {', '.join(odd)}")
    if text.raw("kv_lora_rank") is not None:
        found.append("latent attention (kv_lora_rank)")
    if (text.whole("word_embed_proj_dim") or text.raw("hidden_size")) != text.raw("hidden_size"):
        found.append("an embedding narrower than the layers")
    if text.outer.get("quantization_config") or text.values.get("quantization_config"):
        found.append("weights that are published already quantised")
    return tuple(found)
