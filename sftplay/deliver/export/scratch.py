"""Writes a result's folder whole or not at all, after checking that the disk has room for it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from sftplay.atomic import locked, use_umask
from sftplay.errors import ConfigError, MachineError
from sftplay.units import format_bytes

SLACK_BYTES = 64 * 2**20
"""Room kept for tokenizer, configs and the file system's own tables."""


def check_target(out: Path) -> None:
    """Refuse to write over anything.

    Raises:
        ConfigError: `out` exists.
    """
    if out.exists() or out.is_symlink():
        raise ConfigError("exists already", where=str(out), fix="remove it, or name another folder with OUT=")


def write_folder(out: Path, weight_bytes: int, *, fill: Callable[[Path], None]) -> Path:
    """Make the folder `out` by `fill(scratch)` under a scratch name, then rename it into place.

    Raises:
        ConfigError: `out` exists, or another process is making it.
        MachineError: the disk has no room for `weight_bytes`, or a file cannot be written.
    """
    scratch = out.with_name(f".{out.name}.part")
    try:
        scratch.mkdir(parents=True, exist_ok=True)
        with locked(scratch, waits=False):
            _fill(scratch, out, weight_bytes=weight_bytes, fill=fill)
    except BlockingIOError:
        raise ConfigError("another process is writing it", where=str(out), fix="wait for it to end") from None
    except (OSError, SafetensorError) as error:
        what = f"cannot be written ({getattr(error, 'strerror', None) or str(error).splitlines()[0]})"
        raise MachineError(what, where=str(out), fix="make room, or name another folder with OUT=") from error
    return out


def _fill(scratch: Path, out: Path, *, weight_bytes: int, fill: Callable[[Path], None]) -> None:
    try:
        for left in scratch.iterdir():  # of an attempt that was killed
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        needed, free = weight_bytes + SLACK_BYTES, shutil.disk_usage(scratch).free
        if free < needed:
            what = f"{format_bytes(needed)} ({needed} bytes) are needed and {format_bytes(free)} are free"
            raise MachineError(what, where=str(out), fix="make room, or name a folder on another disk with OUT=")
        fill(scratch)
        use_umask(scratch)
        check_target(out)
        scratch.rename(out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
