"""The shape of a model by its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sftplay.errors import ConfigError
from sftplay.plan.shape.families import FAMILIES, KEYS, MIXTURES, Family, Flag
from sftplay.plan.shape.model_shape import Linear, ModelShape

NESTED = ("text_config", "llm_config", "language_config")
"""Where multimodal configs keep the text model."""

LARGEST = {"layers": 10_000, "experts": 100_000}
LARGEST_WIDTH = 2**31 - 1
"""Beyond these a figure is a slip: no public model comes near."""

AS_PUBLISHED = "write it as the model's own config.json has it"


@dataclass(frozen=True, kw_only=True)
class ConfigJson:
    """The text model's part of a config.json with its family; `where` stands for the file in messages."""

    values: Mapping[str, Any]
    outer: Mapping[str, Any]
    """The whole file: the same mapping unless the model is multimodal."""

    model_type: str
    where: str
    prefix: str = ""

    @property
    def family(self) -> Family:
        return FAMILIES.get(self.model_type, Family())

    @property
    def is_known(self) -> bool:
        return self.model_type in FAMILIES

    def key(self, word: str) -> str:
        """The family's spelling of a word of `KEYS`."""
        return self.family.keys.get(word, KEYS[word])

    def raw(self, key: str) -> Any:
        """The value of a key, or the family's default, unchecked; null counts as missing."""
        value = self.values.get(key)
        return self.family.defaults.get(key) if value is None else value

    def is_off(self, key: str) -> bool:
        """True when a switch is null in the file, or missing there and in the family's defaults."""
        return self.values[key] is None if key in self.values else self.raw(key) is None

    def count(self, word: str) -> int:
        """A positive whole number that has to be there."""
        found = self.optional(word)
        if found is None:
            raise self.error(self.key(word), "is missing", fix=AS_PUBLISHED)
        return found

    def optional(self, word: str) -> int | None:
        """A positive whole number, or None when the key is missing or null."""
        key = self.key(word)
        return self.whole(key, largest=LARGEST.get(word, LARGEST_WIDTH))

    def whole(self, key: str, *, smallest: int = 1, largest: int = LARGEST_WIDTH) -> int | None:
        """The same by a key's own name; 4096.0 is a whole number."""
        value = self.raw(key)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, f"is {quote_value(value)}, not a whole number", fix=AS_PUBLISHED)
        if not smallest <= value <= largest:
            raise self.error(key, f"is {quote_value(value)}", fix=f"give a number from {smallest} to {largest}")
        return value

    def flag(self, flag: Flag) -> bool:
        """A family's flag, looked up when it names a key; a missing key is false."""
        if isinstance(flag, bool):
            return flag
        value = self.raw(flag)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.error(flag, f"is {quote_value(value)}, neither true nor false", fix="write true or false")
        return value

    def word(self, key: str, default: str) -> str:
        """A text value."""
        value = self.raw(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.error(key, f"is {quote_value(value)}, not a word", fix=AS_PUBLISHED)
        return value

    def error(self, key: str, what: str, *, fix: str) -> ConfigError:
        """A refusal that names the key and, for a type the kit does not know, how it was read."""
        unknown = (
            "" if self.is_known else f" (the type {quote_value(self.model_type)} is not known and read as a Llama)"
        )
        return ConfigError(f"{self.prefix}{key} {what}{unknown}", where=self.where, fix=fix)


def open_config(config: Mapping[str, Any], name: str) -> ConfigJson:
    """The text model's part of the content of a config.json; `name` stands for the file in messages.

    Raises:
        ConfigError: no mapping, no model_type, or a model that is no decoder.
    """
    if not isinstance(config, Mapping):
        raise ConfigError("holds no keys with values", where=name, fix="give the config.json of a model")
    text, prefix = _text_part(config, name)
    kind = text.get("model_type")
    if kind is None and text is not config and isinstance(config.get("model_type"), str):
        kind = f"{config['model_type']}_text"
    if not isinstance(kind, str) or not kind:
        what = f"{prefix}model_type " + ("is missing" if kind is None else f"is {quote_value(kind)}, not a word")
        raise ConfigError(what, where=name, fix=AS_PUBLISHED)
    opened = ConfigJson(values=text, outer=config, model_type=kind, where=name, prefix=prefix)
    if config.get("is_encoder_decoder") is True or text.get("is_encoder_decoder") is True:
        raise opened.error(
            "is_encoder_decoder", "is true", fix="name a decoder-only model; no other kind is trained here"
        )
    return opened


def _text_part(config: Mapping[str, Any], name: str) -> tuple[Mapping[str, Any], str]:
    for key in NESTED:
        inner = config.get(key)
        if inner is None:
            continue
        if not isinstance(inner, Mapping):
            raise ConfigError(f"{key} is {quote_value(inner)}, not a mapping", where=name, fix=AS_PUBLISHED)
        return inner, f"{key}."
    return config, ""


def quote_value(value: object) -> str:
    """A value as a message shows it, cut where it is long."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits: Python refuses to print it
        return "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:57]}..."


_SIGLIP = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "image_size": 896,
    "patch_size": 14,
    "num_channels": 3,
}
"""The tower of Gemma 3: its repositories' vision_config, the same for 4B, 12B and 27B."""


def count_vision(config: ConfigJson, hidden: int) -> int | None:
    """Parameters of vision tower and projector, 0 for a text model, None for a tower the kit cannot count.

    `hidden` is the text model's width. Counted: SigLIP behind Gemma 3's projector, by the modules in transformers'
    modeling_siglip.py and modeling_gemma3.py (no pooling head).
    """
    vision = config.outer.get("vision_config")
    if vision is None:
        return 0 if config.outer is config.values else None
    is_gemma3 = config.outer.get("model_type") == "gemma3" and isinstance(vision, Mapping)
    if not is_gemma3 or vision.get("vision_use_head") is True:
        return None
    tower = open_config({**_SIGLIP, **vision, "model_type": "siglip_vision_model"}, config.where)
    return _siglip(tower) + _width(tower) * hidden + _width(tower)


def _width(tower: ConfigJson) -> int:
    return tower.count("hidden")


def _siglip(tower: ConfigJson) -> int:
    width, mlp, layers = tower.count("hidden"), tower.count("mlp"), tower.count("layers")
    image, patch = tower.whole("image_size") or 1, tower.whole("patch_size") or 1
    channels = tower.whole("num_channels") or 1
    embeddings = channels * patch * patch * width + width + (image // patch) ** 2 * width
    attention = 4 * (width * width + width)
    feed_forward = 2 * width * mlp + mlp + width
    return embeddings + layers * (attention + feed_forward + 4 * width) + 2 * width


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
