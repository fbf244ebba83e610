"""Room on the disk: predicted for the whole run, checked before a checkpoint, and reported when a write has failed.

It removes only files that were half written when the disk became full.
"""

from __future__ import annotations

import errno
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import TrainerCallback

from sftplay import log
from sftplay.errors import RunError
from sftplay.launch.checkpoints import is_marked, list_checkpoints, list_marked

WRITE_FAILED = ("while serializing", "PytorchStreamWriter", "unexpected pos", "iostream error")
"""Texts in errors when a file cannot be written: of safetensors, whose errors of reading have another text, and of
torch.save (caffe2/serialize/inline_container.cc)."""

SMALL_FILES_BYTES = 1 << 16  # room for status.json, metrics.jsonl and logs next to a checkpoint

FIX = "make room, then continue with `make resume`; the last complete checkpoint is untouched"


def folder_bytes(folder: Path) -> int:
    """Return the size of all files below `folder`."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def checkpoint_bytes(checkpoints: Path, model: Any, *, optimizer: Any) -> int:
    """Return the size of the next checkpoint: that of the newest complete one; without one, the size of its tensors."""
    if complete := list_marked(checkpoints):
        return folder_bytes(complete[-1])
    states = (value for state in optimizer.state.values() for value in state.values() if hasattr(value, "nbytes"))
    return trained_bytes(model) + sum(int(state.nbytes) for state in states)


def trained_bytes(model: Any) -> int:
    """Return the size of the weights that train."""
    return sum(int(weight.nbytes) for weight in model.parameters() if weight.requires_grad)


def check_room(checkpoints: Path, size_bytes: int) -> None:
    """Raise RunError where there is no room for a checkpoint of this size and the small files next to it."""
    checkpoints.mkdir(parents=True, exist_ok=True)
    free, needed = shutil.disk_usage(checkpoints).free, size_bytes + SMALL_FILES_BYTES
    if free < needed:
        raise RunError(
            f"the disk is too full for the next checkpoint: {needed:,} bytes needed, {free:,} free",
            where=str(checkpoints),
            fix=FIX,
        )


@contextmanager
def report_full_disk(folder: Path) -> Iterator[None]:
    """Turn a failed write into a RunError with its remedy, and remove half-written files in the run's `folder`.

    A full disk raises one of three errors: OSError, safetensors' own error, and a RuntimeError of torch.save.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if not isinstance(error, OSError) and not any(sign in str(error) for sign in WRITE_FAILED):
            raise
        room = ""
        if not isinstance(error, OSError) or error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            checkpoints = folder / "checkpoints"
            room = f"{shutil.disk_usage(folder).free:,} bytes free"
            if complete := list_marked(checkpoints):
                room = f"a checkpoint needs {folder_bytes(complete[-1]):,} bytes, {room}"
            unmarked = [checkpoint for checkpoint in list_checkpoints(checkpoints) if not is_marked(checkpoint)]
            for unfinished in (*unmarked, folder / ".adapter.part", folder / ".model.part"):
                shutil.rmtree(unfinished, ignore_errors=True)
        where = getattr(error, "filename", None) or folder
        what = f"writing failed ({str(error).splitlines()[0]}){f': {room}' if room else ''}"
        raise RunError(what, where=str(where), fix=FIX) from error


class WarnOfFullDisk(TrainerCallback):
    """Warns once, while there is time, that the disk will be full before the end of the run.

    The prediction counts the `limit` checkpoints that are kept, the result, and the other files on the disk, which go
    on growing at the rate since the first prediction. It is made after the first step, when the optimizer's states
    exist, and after each checkpoint, behind the callback that removes old ones.
    """

    def __init__(self, checkpoints: Path, limit: int) -> None:
        self.checkpoints, self.limit = checkpoints, limit
        self._first: tuple[int, int] | None = None
        """Step of the first prediction, and the bytes that were free then or held by checkpoints."""

        self._warned = False

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if self._first is None and not control.should_save:
            self._predict(state, more["model"], optimizer=more["optimizer"])

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._predict(state, more["model"], optimizer=more["optimizer"])

    def _predict(self, state: Any, model: Any, *, optimizer: Any) -> None:
        if self._warned or not log.is_main():
            return
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        free, held = shutil.disk_usage(self.checkpoints).free, folder_bytes(self.checkpoints)
        step, steps_left = state.global_step, state.max_steps - state.global_step
        self._first = self._first or (step, free + held)
        others = max(0, self._first[1] - free - held) * steps_left // max(1, step - self._first[0])
        size = checkpoint_bytes(self.checkpoints, model, optimizer=optimizer)
        kept = len(list_marked(self.checkpoints))
        saves = math.ceil(steps_left / state.save_steps)
        # A new checkpoint is complete before an old one is removed.
        growth = size * max(min(saves, self.limit + 1 - kept), min(saves, 1))
        result = trained_bytes(model)
        needed = growth + result + others + SMALL_FILES_BYTES
        if free < needed:
            self._warned = True
            log.say(
                f"warning: the disk will be full before step {state.max_steps}: {free:,} bytes free, {needed:,} needed"
                f" (checkpoints {growth:,} at {size:,} each, result {result:,}, growth of other files {others:,});"
                f" make room on {self.checkpoints}, or lower train.save_total_limit"
            )
