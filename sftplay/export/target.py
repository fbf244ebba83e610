"""Where a result goes; asked before the libraries are imported that make it."""

from __future__ import annotations

from pathlib import Path

from sftplay.errors import ConfigError


def check_target(out: Path) -> None:
    """Refuse to write over anything: raise ConfigError where `out` exists."""
    if out.exists() or out.is_symlink():
        raise ConfigError("exists already", where=str(out), fix="remove it, or name another folder with OUT=")
