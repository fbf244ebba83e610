"""The content of a config.json, read key by key: every figure that leaves it has been checked.

How a family spells its keys stands in `families`; `from_config` makes a shape of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sftplay.errors import ConfigError
from sftplay.plan.shape.families import FAMILIES, KEYS, Family, Flag

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
