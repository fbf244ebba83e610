"""Where a model comes from: a local folder, a builtin, or a hub name; and what its config.json says.

It loads no weights and imports no heavy library.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from sftplay.errors import ConfigError

BUILTIN = "builtin:"

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def is_local(name: str) -> bool:
    """True when opening the model needs no hub."""
    return name.startswith(BUILTIN) or Path(name).is_dir()


def check_source(name: str, where: str) -> None:
    """Refuse a name that can be neither a folder, nor a builtin, nor on a hub.

    Raises:
        ConfigError: with what was looked for.
    """
    if name.startswith(BUILTIN) or (_HUB_NAME.fullmatch(name) and not Path(name).exists()):
        return
    folder = Path(name)
    if not folder.is_dir():
        raise ConfigError(
            f"no model folder {name!r}", where=where, fix="check the path, or give a hub name (org/model)"
        )
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{name!r} holds no config.json", where=where, fix="point to a folder made by save_pretrained"
        )


def read_shape(name: str) -> dict[str, Any]:
    """The model's config.json when it lies on this machine, else an empty dict."""
    path = Path(name) / "config.json"
    if not path.is_file():
        return {}
    shape: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return {**shape, **shape.get("text_config", {})}
