"""Room on the disk: looked at before a checkpoint begins, and told in bytes when a write has failed.

It removes only what was half written when the disk took no more.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from sftplay.errors import RunError
from sftplay.watch.checkpoints import MARKER, list_checkpoints

TORCH_WRITE_FAILED = ("PytorchStreamWriter", "unexpected pos", "iostream error")
"""What torch.save's errors say when the disk takes no more (caffe2/serialize/inline_container.cc)."""

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

SMALL_FILES_BYTES = 1 << 16
"""Room for status.json, metrics.jsonl and logs beside a checkpoint."""

HALF_RESULTS = (".adapter.part", ".model.part")

FIX = "make room, then continue with `make resume`; the last complete checkpoint is untouched"


def folder_bytes(folder: Path) -> int:
    """What the files below `folder` take."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def checkpoint_bytes(checkpoints: Path, model: Any, optimizer: Any) -> int:
    """What the next checkpoint will take: as much as the newest complete one, before that as much as its tensors."""
    for checkpoint in reversed(list_checkpoints(checkpoints)):
        if (checkpoint / MARKER).is_file():
            return folder_bytes(checkpoint)
    weights = [p for p in model.parameters() if p.requires_grad]
    states = [t for state in optimizer.state.values() for t in state.values() if hasattr(t, "nbytes")]
    return sum(int(tensor.nbytes) for tensor in (*weights, *states))


def demand_room(checkpoints: Path, needed_bytes: int) -> None:
    """Look for room before a checkpoint begins, so that no half one is left.

    Raises:
        RunError: less is free than `needed_bytes` and a little for the small files.
    """
    checkpoints.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(checkpoints).free
    if free < needed_bytes + SMALL_FILES_BYTES:
        raise RunError(
            f"the disk is too full for the next checkpoint: {needed_bytes + SMALL_FILES_BYTES:,} bytes needed,"
            f" {free:,} free",
            where=str(checkpoints),
            fix=FIX,
        )


@contextmanager
def report_full_disk(folder: Path) -> Iterator[None]:
    """Turn a write that fails into a RunError with its remedy, and free what was half written in the run's `folder`.

    A full disk has three faces: OSError, safetensors' own error, and a RuntimeError of torch.save.

    Raises:
        RunError: something could not be written.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(sign in str(error) for sign in TORCH_WRITE_FAILED):
            raise
        full = not isinstance(error, OSError) or error.errno in DISK_ERRORS
        told = _room_told(folder) if full else ""
        if full:
            _remove_halves(folder)
        where = getattr(error, "filename", None) or folder
        raise RunError(f"writing failed ({str(error).splitlines()[0]}){told}", where=str(where), fix=FIX) from error


def _room_told(folder: Path) -> str:
    """Free bytes, and those a checkpoint needs, as far as they are known."""
    free = shutil.disk_usage(folder).free
    complete = [each for each in list_checkpoints(folder / "checkpoints") if (each / MARKER).is_file()]
    needed = f"a checkpoint needs {folder_bytes(complete[-1]):,} bytes, " if complete else ""
    return f": {needed}{free:,} bytes free"


def _remove_halves(folder: Path) -> None:
    halves = [each for each in list_checkpoints(folder / "checkpoints") if not (each / MARKER).is_file()]
    for half in (*halves, *(folder / name for name in HALF_RESULTS)):
        with suppress(OSError):
            shutil.rmtree(half)
