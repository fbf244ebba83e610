"""Shapes that few models have: layers of several kinds, counted experts (families of 2025 and 2026), towers for images.

Each function follows the modules of transformers 5.23, `models/<family>/modeling_<family>.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

from sftplay.plan.config_json import AS_PUBLISHED, TEXT_ONLY, ConfigJson, open_config, quote_value
from sftplay.plan.shape import DeltaRule, Linear, ModelShape, Routed, shortest_repeat

FULL, NEAR, LINEAR = "full_attention", "sliding_attention", "linear_attention"
OF_MIXTURES = "a mixture of experts"
"""What begins the line of a plan that does not know what experts keep; these families' are counted."""


def layered_shape(text: ConfigJson, base: ModelShape) -> ModelShape:
    """Return `base`, the shape of a dense decoder of these sizes, as the family of `text` builds its layers.

    Raises:
        ConfigError: a key that is needed is missing, no number, or out of bounds.
    """
    made = BUILDERS[text.model_type](text, replace(base, layers=1, other_params=0))
    counts = Counter(made)
    parts = tuple(replace(kind, layers=count, starts_at=made.index(kind)) for kind, count in counts.items())
    most = max(parts, key=lambda kind: kind.layers)
    unmodelled = tuple(what for what in base.unmodelled if not what.startswith((OF_MIXTURES, "layers of another kind")))
    other, outside = base.other_params, tuple[Linear, ...]()
    if text.model_type == "gemma4_text" and (narrow := _per_layer_width(text)):
        # A second embedding, a projection and a norm give each layer an input of its own.
        rows = text.whole("vocab_size_per_layer_input") or 262_144
        other += rows * base.layers * narrow + narrow
        outside = (Linear(name="per_layer_model_projection", inputs=base.hidden, outputs=base.layers * narrow),)
    return replace(
        most, layers=base.layers, starts_at=0, other_params=other, unmodelled=unmodelled,
        parts=parts if len(parts) > 1 else (),
        experts=max(kind.experts for kind in parts), state_leaks=any(kind.mixer for kind in parts),
        sliding_window=base.sliding_window, layer_pattern=shortest_repeat(made), linears_outside=outside,
    )  # fmt: skip


def _kinds(text: ConfigJson, *, usual: Callable[[int], str]) -> list[str]:
    """The kind of each layer, as `layer_types` has it or as the family's configuration class fills it in."""
    given, layers = text.values.get("layer_types"), text.count("layers")
    if given is None:
        return [usual(n) for n in range(layers)]
    if not isinstance(given, list) or len(given) < layers or not set(map(str, given)) <= {FULL, NEAR, LINEAR}:
        raise text.error("layer_types", f"is {quote_value(given)}, not a kind for each layer", fix=AS_PUBLISHED)
    return [str(kind) for kind in given[:layers]]


def _whole(text: ConfigJson, key: str, usual: int) -> int:
    return text.whole(key) or usual


def _add_experts(
    kind: ModelShape, text: ConfigJson, *, experts: str, width: int, chosen: str, usual: int
) -> ModelShape:
    """The layer with so many gated experts of `width`, and a router."""
    count = text.whole(experts)
    if count is None:
        raise text.error(experts, "is missing", fix=AS_PUBLISHED)
    weights = count * 3 * kind.hidden * width
    routed = Routed(chosen=min(count, _whole(text, chosen, usual)), width=width, params=weights)
    other = kind.layer_other_params + weights + count * kind.hidden
    return replace(kind, experts=count, routed=routed, layer_other_params=other)


def _with_shared(kind: ModelShape, width: int, more: tuple[Linear, ...] = ()) -> ModelShape:
    made = [
        replace(one, outputs=width) if one.inputs == kind.hidden else replace(one, inputs=width) for one in _mlp(kind)
    ]
    return replace(kind, mlp=width, linears=(*_attention(kind), *made, *more))


def _mlp(kind: ModelShape) -> list[Linear]:
    return [linear for linear in kind.linears if linear.is_mlp]


def _attention(kind: ModelShape) -> list[Linear]:
    return [linear for linear in kind.linears if not linear.is_mlp]


def _qwen(text: ConfigJson, base: ModelShape) -> list[ModelShape]:
    """Qwen3-Next and Qwen3.5: three layers of a gated delta rule, then one whose attention has an output gate."""
    if text.model_type != "qwen3_5_text":
        gate = Linear(name="shared_expert_gate", inputs=base.hidden, outputs=1, is_mlp=True)
        width = _whole(text, "moe_intermediate_size", 512)
        base = _with_shared(base, _whole(text, "shared_expert_intermediate_size", 512), (gate,))
        usual = 10 if text.model_type == "qwen3_next" else 8
        base = _add_experts(
            base, text, experts="num_experts", width=width, chosen="num_experts_per_tok", usual=usual
        )  # fmt: skip
    query, *others = _attention(base)
    attends = replace(
        base, gated_attention=True, linears=(replace(query, outputs=2 * query.outputs), *others, *_mlp(base)),
        layer_other_params=base.layer_other_params + (query.outputs if query.bias else 0),
    )  # fmt: skip
    rule = DeltaRule(
        key_heads=_whole(text, "linear_num_key_heads", 16), heads=_whole(text, "linear_num_value_heads", 32),
        key_dim=_whole(text, "linear_key_head_dim", 128), value_dim=_whole(text, "linear_value_head_dim", 128),
    )  # fmt: skip
    if rule.heads % rule.key_heads:
        what = f"is {rule.key_heads}, which does not divide linear_num_value_heads={rule.heads}"
        raise text.error("linear_num_key_heads", what, fix=AS_PUBLISHED)
    keys, values = rule.key_heads * rule.key_dim, rule.heads * rule.value_dim
    sizes = {"in_proj_qkvz": 2 * keys + 2 * values, "in_proj_ba": 2 * rule.heads}
    if text.model_type != "qwen3_next":
        sizes = {"in_proj_qkv": 2 * keys + values, "in_proj_z": values, "in_proj_b": rule.heads,
                 "in_proj_a": rule.heads}  # fmt: skip
    inward = [Linear(name=name, inputs=base.hidden, outputs=width) for name, width in sizes.items()]
    convolution = (2 * keys + values) * _whole(text, "linear_conv_kernel_dim", 4)
    of_attention = 2 * base.head_dim + sum(one.outputs for one in _attention(base) if one.bias)
    other = base.layer_other_params - of_attention + convolution + 2 * rule.heads + rule.value_dim
    out = Linear(name="out_proj", inputs=values, outputs=base.hidden)
    linear = replace(
        base, mixer=rule, qk_norm=False, linears=(*inward, out, *_mlp(base)), layer_other_params=other
    )  # fmt: skip
    interval = _whole(text, "full_attention_interval", 4)
    kinds = _kinds(text, usual=lambda n: LINEAR if (n + 1) % interval else FULL)
    return [linear if kind == LINEAR else attends for kind in kinds]


def _glm(text: ConfigJson, base: ModelShape) -> list[ModelShape]:
    """GLM 4.5 to 4.7: the first layers dense, the others experts next to one that every token takes."""
    width = _whole(text, "moe_intermediate_size", 1408)
    mixed = _with_shared(base, width * _whole(text, "n_shared_experts", 1))
    mixed = _add_experts(
        mixed, text, experts="n_routed_experts", width=width, chosen="num_experts_per_tok", usual=8
    )  # fmt: skip
    dense = text.whole("first_k_dense_replace", smallest=0)
    dense = 1 if dense is None else dense
    return [base if n < dense else mixed for n in range(text.count("layers"))]


def _gpt_oss(text: ConfigJson, base: ModelShape) -> list[ModelShape]:
    """GPT-OSS: experts with biases in every layer, and a learned sink for each head."""
    chosen = min(base.experts, _whole(text, "num_experts_per_tok", 4))
    routed = Routed(chosen=chosen, width=base.mlp, params=base.experts * 3 * base.hidden * base.mlp)
    mixed = replace(base, routed=routed)
    kinds = _kinds(text, usual=lambda n: FULL if n % 2 else NEAR)
    return [mixed if kind == NEAR else replace(mixed, sliding_window=None) for kind in kinds]


def _per_layer_width(text: ConfigJson) -> int:
    width = text.whole("hidden_size_per_layer_input", smallest=0)
    return 256 if width is None else width


def _gemma(text: ConfigJson, base: ModelShape) -> list[ModelShape]:
    """Gemma 4: windows and whole rows with heads of two widths; keys and values shared by the last layers."""
    if narrow := _per_layer_width(text):
        # What a layer is told of the token besides the stream, as in Gemma 3n.
        gates = (
            Linear(name="per_layer_input_gate", inputs=base.hidden, outputs=narrow),
            Linear(name="per_layer_projection", inputs=narrow, outputs=base.hidden),
        )
        other = base.layer_other_params + base.hidden
        base = replace(base, linears=(*gates, *base.linears), layer_other_params=other, norms_per_layer=5)
    if text.flag("enable_moe_block"):
        width = _whole(text, "moe_intermediate_size", 0)
        base = _add_experts(base, text, experts="num_experts", width=width, chosen="top_k_experts", usual=1)
        router = Linear(name="proj", inputs=base.hidden, outputs=base.experts)
        # The router is a linear here; a scale for the stream and one for each expert stand next to it.
        other = base.layer_other_params - base.experts * base.hidden + base.hidden + base.experts + 3 * base.hidden
        norms = base.norms_per_layer + 4  # the router's has no weight
        base = replace(base, linears=(router, *base.linears), layer_other_params=other, norms_per_layer=norms)
    is_one = text.flag("attention_k_eq_v")
    wide = _whole(text, "global_head_dim", 512)
    few = (text.whole("num_global_key_value_heads") if is_one else None) or base.kv_heads
    layers = text.count("layers")
    shared = min(layers, text.whole("num_kv_shared_layers", smallest=0) or 0)
    doubles = text.flag("use_double_wide_mlp")
    kinds = _kinds(text, usual=lambda n: NEAR if (n + 1) % 6 else FULL)
    kinds[-1] = FULL
    return [
        _gemma_layer(
            base,
            head_dim=base.head_dim if kind == NEAR else wide,
            kv_heads=base.kv_heads if kind == NEAR else few,
            is_near=kind == NEAR,
            has_values=kind == NEAR or not is_one,
            shares=n >= layers - shared,
            doubles=doubles,
        )
        for n, kind in enumerate(kinds)
    ]


def _gemma_layer(
    base: ModelShape, *, head_dim: int, kv_heads: int, is_near: bool, has_values: bool, shares: bool, doubles: bool
) -> ModelShape:
    """One layer; with `shares` it attends to keys and values of an earlier one."""
    dropped = ({"k_proj", "v_proj"} if shares else set()) | (set() if has_values else {"v_proj"})
    width = base.mlp * (2 if doubles and shares else 1)
    widths = {"q_proj": base.heads * head_dim, "k_proj": kv_heads * head_dim, "v_proj": kv_heads * head_dim,
              "gate_proj": width, "up_proj": width}  # fmt: skip
    linears = []
    for one in base.linears:
        if one.name in widths:
            one = replace(one, outputs=widths[one.name])
        elif one.name == "o_proj":
            one = replace(one, inputs=base.heads * head_dim)
        elif one.name == "down_proj":
            one = replace(one, inputs=width)
        if one.name not in dropped:
            linears.append(one)
    biases = sum(one.outputs for one in linears if one.bias) - sum(one.outputs for one in base.linears if one.bias)
    norms = (1 if shares else 2) * head_dim - 2 * base.head_dim
    return replace(
        base, head_dim=head_dim, kv_heads=kv_heads, mlp=width, linears=tuple(linears),
        layer_other_params=base.layer_other_params + biases + norms,
        sliding_window=base.sliding_window if is_near else None,
    )  # fmt: skip


BUILDERS: dict[str, Callable[[ConfigJson, ModelShape], list[ModelShape]]] = {
    "qwen3_next": _qwen,
    "qwen3_5_text": _qwen,
    "qwen3_5_moe_text": _qwen,
    "glm4_moe": _glm,
    "gpt_oss": _gpt_oss,
    "gemma4_text": _gemma,
}


_SIGLIP = {
    "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "image_size": 896, "patch_size": 14,
    "num_channels": 3,
}  # fmt: skip
"""The tower of Gemma 3: its repositories' vision_config, the same for 4B, 12B and 27B."""


def count_vision(config: ConfigJson, hidden: int) -> int | None:
    """Count the parameters of vision tower and projector: 0 for a text model, None for a tower that is not known.

    `hidden` is the text model's width. Counted: SigLIP behind Gemma 3's projector, by the modules in transformers'
    modeling_siglip.py and modeling_gemma3.py (no pooling head).
    """
    vision = config.outer.get("vision_config")
    if config.outer.get("model_type") in TEXT_ONLY:
        return 0
    if (towers := config.outer.get("towers")) is not None:  # counted beforehand, in the shipped table
        return int(towers)
    if (
        config.outer.get("model_type") != "gemma3"
        or not isinstance(vision, Mapping)
        or vision.get("vision_use_head") is True
    ):
        return None
    tower = open_config({**_SIGLIP, **vision, "model_type": "siglip_vision_model"}, config.where)
    width, mlp, layers = tower.count("hidden"), tower.count("mlp"), tower.count("layers")
    image, patch = tower.whole("image_size") or 1, tower.whole("patch_size") or 1
    channels = tower.whole("num_channels") or 1
    embeddings = channels * patch * patch * width + width + (image // patch) ** 2 * width
    attention = 4 * (width * width + width)
    feed_forward = 2 * width * mlp + mlp + width
    projector = width * hidden + width
    return embeddings + layers * (attention + feed_forward + 4 * width) + 2 * width + projector
