"""A model's config.json: its text part and its values, checked, and what the files of a family leave unsaid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sftplay.errors import ConfigError
from sftplay.plan.shape import Family, Flag

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

MIXTURES = frozenset({"gpt_oss", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"})
"""Families whose MLP is a mixture of experts in every layer."""

UNKNOWN = Family()

TEXT_ONLY = ("qwen3_5", "qwen3_5_moe")
"""Multimodal models whose text part alone `AutoModelForCausalLM` opens (transformers 5.23, modeling_auto.py)."""

WITH_TEXT = frozenset({
    "dots3_note", "emu3", "fuyu", "gemma3", "gemma3n", "gemma4", "gemma4_assistant", "gemma4_unified",
    "gemma4_unified_assistant", "got_ocr2", "llama4", "mllama", "moss_transcribe_diarize", "qwen3_5", "qwen3_5_moe",
    "qwen4_exp",
})  # fmt: skip
"""All models with a text model inside that `AutoModelForCausalLM` opens (transformers 5.23, modeling_auto.py)."""

NESTED = ("text_config", "llm_config", "language_config")  # where multimodal configs keep the text model

# Beyond these a figure is a slip: no public model comes near.
LARGEST, LARGEST_WIDTH = {"layers": 10_000, "experts": 100_000}, 2**31 - 1

AS_PUBLISHED = "write it as the model's own config.json has it"


@dataclass(frozen=True, kw_only=True)
class ConfigJson:
    """The text model's part of a config.json with its family; `where` stands for the file in messages."""

    values: Mapping[str, Any]
    outer: Mapping[str, Any]  # the whole file: the same mapping unless the model is multimodal
    model_type: str
    where: str
    prefix: str = ""
    family: Family = UNKNOWN

    @property
    def is_known(self) -> bool:
        return self.family is not UNKNOWN

    @property
    def has_towers(self) -> bool:
        """Whether parts for images or sound are opened with it that no formula counts."""
        kind = self.outer.get("model_type")
        return self.outer is not self.values and kind not in ("gemma3", *TEXT_ONLY) and "towers" not in self.outer

    def key(self, word: str) -> str:
        """The family's spelling of a word of `KEYS`."""
        return self.family.keys.get(word, KEYS[word])

    def raw(self, key: str) -> Any:
        """The value of a key, or the family's default, unchecked; null counts as missing."""
        value = self.values.get(key)
        if value is None and key in self.family.also:
            value = self.values.get(self.family.also[key])
        return self.family.defaults.get(key) if value is None else value

    def is_off(self, key: str) -> bool:
        """True when a switch is null in the file, or missing there and in the family's defaults."""
        return self.values[key] is None if key in self.values else self.raw(key) is None

    def count(self, word: str) -> int:
        """A positive whole number that has to be there."""
        if (found := self.optional(word)) is None:
            raise self.error(self.key(word), "is missing", fix=AS_PUBLISHED)
        return found

    def optional(self, word: str) -> int | None:
        """A positive whole number, or None when the key is missing or null."""
        return self.whole(self.key(word), largest=LARGEST.get(word, LARGEST_WIDTH))

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
        value = flag if isinstance(flag, bool) else self.raw(flag)
        return value is not None and self.check_flag(str(flag), value)

    def check_flag(self, key: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise self.error(key, f"is {quote_value(value)}, neither true nor false", fix="write true or false")
        return value

    def word(self, key: str, default: str) -> str:
        value = self.raw(key)
        if value is not None and not isinstance(value, str):
            raise self.error(key, f"is {quote_value(value)}, not a word", fix=AS_PUBLISHED)
        return default if value is None else value

    def error(self, key: str, what: str, *, fix: str) -> ConfigError:
        """A refusal that names the key and, for a type the kit does not know, how it was read."""
        if not self.is_known:
            what += f" (the type {quote_value(self.model_type)} is not known and read as a Llama)"
        return ConfigError(f"{self.prefix}{key} {what}", where=self.where, fix=fix)


def open_config(config: Mapping[str, Any], name: str) -> ConfigJson:
    """Find the text model's part in the content of a config.json; `name` stands for the file in messages.

    Raises:
        ConfigError: no mapping, no model_type, or a model that is no decoder.
    """
    if not isinstance(config, Mapping):
        raise ConfigError("holds no keys with values", where=name, fix="give the config.json of a model")
    text, prefix = config, ""
    if nested := next((key for key in NESTED if config.get(key) is not None), None):
        text, prefix = config[nested], f"{nested}."
        if not isinstance(text, Mapping):
            raise ConfigError(f"{nested} is {quote_value(text)}, not a mapping", where=name, fix=AS_PUBLISHED)
    kind = text.get("model_type")
    if kind is None and text is not config and isinstance(config.get("model_type"), str):
        kind = f"{config['model_type']}_text"
    if not isinstance(kind, str) or not kind:
        what = f"{prefix}model_type " + ("is missing" if kind is None else f"is {quote_value(kind)}, not a word")
        raise ConfigError(what, where=name, fix=AS_PUBLISHED)
    fix = "name a decoder-only model; no other kind is trained here"
    if (family := COMMON.get(kind)) is None:
        from sftplay.plan.more_families import ENCODERS, FAMILIES

        if kind in ENCODERS and text.get("is_decoder") is not True:
            what = f"{prefix}model_type is {kind}, an encoder: each token would see the one that it should predict"
            raise ConfigError(what, where=name, fix=fix)
        family = FAMILIES.get(kind, UNKNOWN)
    opened = ConfigJson(values=text, outer=config, model_type=kind, where=name, prefix=prefix, family=family)
    if config.get("is_encoder_decoder") is True or text.get("is_encoder_decoder") is True:
        raise opened.error("is_encoder_decoder", "is true", fix=fix)
    return opened


def refuse_unopened(config: Any, *, where: str) -> None:
    """Raise ConfigError for the config.json of a model that is more than its text model, and that no class opens which
    the kit trains; code that ships with a model may have one.
    """
    if not isinstance(config, Mapping) or not any(isinstance(config.get(key), Mapping) for key in NESTED):
        return
    kind, shipped = config.get("model_type"), config.get("auto_map")
    if kind in WITH_TEXT or (isinstance(shipped, Mapping) and "AutoModelForCausalLM" in shipped):
        return
    what = f"a model of the type {quote_value(kind)} is for images or sound too, and has no class of text alone"
    fix = "name a model of text alone, or of a type whose text part can be opened: gemma3, gemma4, llama4, qwen3_5"
    raise ConfigError(f"{what} (transformers' AutoModelForCausalLM)", where=where, fix=fix)


def quote_value(value: object) -> str:
    """Quote a value for a message, cut where it is long."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits: Python refuses to print it
        return "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:57]}..."
