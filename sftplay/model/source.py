"""Find a model: a folder, the hub's cache, or a built-in one."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

from sftplay import log
from sftplay.errors import ConfigError
from sftplay.places import cache_root, find_hub_cache

BUILTIN = "builtin:"
ADAPTER_CONFIG = "adapter_config.json"

TINY: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 768, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 2048, "tie_word_embeddings": True,
    "hidden_act": "silu",
}  # fmt: skip
DIGITS = TINY | {
    "vocab_size": 11, "hidden_size": 48, "intermediate_size": 192, "num_hidden_layers": 2,
    "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
BUILTIN_CONFIGS = {
    "builtin:tiny": TINY, "builtin:digits": DIGITS, "builtin:copier": DIGITS, "builtin:steps": DIGITS
}  # fmt: skip
"""The shape in the config.json of a built-in model, for use before the model is made."""

_HUB_NAME = re.compile(r"(?!.*(?:--|\.\.|[.-]/))\w[\w.-]*(?:/\w[\w.-]*)?(?<![.-])(?<!\.git)", re.ASCII)


def is_local(name: str) -> bool:
    """Say whether opening the model needs no hub."""
    return name.startswith(BUILTIN) or Path(name).is_dir()


def is_hub_shaped(name: str) -> bool:
    """Say whether a hub could have a model of this name, by its own rules (huggingface_hub, utils/_validators.py)."""
    return len(name) <= 96 and _HUB_NAME.fullmatch(name) is not None


def is_downloaded(name: str) -> bool:
    """Say whether the hub cache of this machine holds something of the model `name`."""
    return (find_hub_cache() / f"models--{name.replace('/', '--')}").is_dir()


def check_source(name: str, where: str, *, allow_pickle: bool = False) -> None:
    """Refuse a name that can be neither a folder, nor a builtin, nor on a hub, and a folder that cannot be opened.

    Raises:
        ConfigError: the name or the folder cannot be used.
    """
    if name.startswith(BUILTIN) or (is_hub_shaped(name) and not Path(name).exists()):
        return
    folder = Path(name)
    if not folder.is_dir():
        fix = "check the path, or give a hub name (org/model)"
        raise ConfigError(f"no model folder {name!r}", where=where, fix=fix)
    if (folder / ADAPTER_CONFIG).is_file():
        # transformers would open the adapter's base instead.
        fix = f"write model.adapter: {name}, and the adapter's base as model.name"
        raise ConfigError(f"{name!r} holds an adapter, not a model", where=where, fix=fix)
    if not (folder / "config.json").is_file():
        fix = "point to a folder made by save_pretrained"
        raise ConfigError(f"{name!r} holds no config.json", where=where, fix=fix)
    check_pickles(folder, where, allow_pickle=allow_pickle)


def describe_pickle(error: Exception) -> str:
    """Return why torch could not open a pickle, in the kit's words: torch's own advise to switch its check off."""
    if found := re.search(r"GLOBAL ([\w.]+)", str(error)):
        return f"holds more than numbers: opening it would run {found[1]}"
    return "holds more than numbers" if REFUSED_PICKLE in str(error) else "cannot be read"


def check_pickles(folder: Path, where: str, *, allow_pickle: bool) -> None:
    """Refuse weights that are only there as pickles, which can run code when they are opened.

    Raises:
        ConfigError: the folder has only pickles; the message names one.
    """
    pickled = sorted(path.name for path in folder.glob("*.bin") if "model" in path.name)
    if pickled and not allow_pickle and not any(folder.glob("*.safetensors")):
        raise ConfigError(f"{folder} holds its weights only as a pickle ({pickled[0]})", where=where, fix=PICKLE_FIX)


PICKLE_FIX = (
    "take a copy in safetensors (save_pretrained writes one), or set model.allow_pickle: true if you trust its maker"
)
SAFE_COPY = "take a copy in safetensors from its maker; the kit never opens such a pickle"
REFUSED_PICKLE = "Weights only load failed"
"""The beginning of torch's advice to switch `weights_only` off (torch 2.13, `serialization.py`)."""


def read_shape(name: str) -> dict[str, Any]:
    """Return the model's config.json if it is on this machine, else an empty dict."""
    path = Path(name) / "config.json"
    if not path.is_file():
        return {}
    shape: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return {**shape, **shape.get("text_config", {})}


def is_quantised(name: str, revision: str | None) -> bool:
    """Say whether the model is published in quantised form. True as well where its config.json is not here."""
    if name.startswith(BUILTIN):
        return False
    path: Path | str | object | None = Path(name) / "config.json"
    if not Path(name).is_dir():
        from huggingface_hub import try_to_load_from_cache

        path = try_to_load_from_cache(name, "config.json", revision=revision or "main")
    try:
        return "quantization_config" in json.loads(Path(str(path)).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return True


def locate(name: str) -> str:
    """Return what the libraries can open: a folder for `builtin:` names, built at first use; other names unchanged."""
    if not name.startswith(BUILTIN):
        return name
    from sftplay.model.builtin import ensure_builtin

    say = partial(log.status, tag="model")
    return str(ensure_builtin(name.removeprefix(BUILTIN), cache_root() / "builtin", say=say))
