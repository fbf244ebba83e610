"""Turns a model's name into what the libraries can open; builds a builtin model the first time it is asked for."""

from __future__ import annotations

from pathlib import Path

from sftplay import log
from sftplay.model.builtin import ensure_builtin
from sftplay.model.source import BUILTIN

CACHE = Path(".cache") / "builtin"


def locate(name: str) -> str:
    """A folder for `builtin:` names, any other name unchanged."""
    if not name.startswith(BUILTIN):
        return name
    return str(ensure_builtin(name.removeprefix(BUILTIN), CACHE, lambda message: log.status(message, "model")))
