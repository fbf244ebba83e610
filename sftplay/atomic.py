"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from sftplay.errors import ConfigError


def write_text(path: Path, text: str) -> None:
    """Write a small file so that a reader sees the old content or the new, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with scratch.open("w", encoding="utf-8") as handle:
            handle.write(text)
            handle.flush()
            os.fsync(handle.fileno())
        scratch.replace(path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise


def check_new_file(path: Path) -> None:
    """Raise ConfigError where there is something of that name already, or no folder can be above it."""
    if path.exists() or path.is_symlink():
        raise ConfigError("exists already", where=str(path), fix="choose another file with OUT=, or remove that one")
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        what = f"cannot be written: {above} is {'not writable' if above.is_dir() else 'a file'}"
        raise ConfigError(what, where=str(path), fix="choose another file with OUT=")
