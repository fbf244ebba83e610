"""Whether the Trainer can go on from a checkpoint: looked at before it tries, so that an older one may be taken.

A marker says that no file has changed since it was written. It does not say that the files make sense.
"""

from __future__ import annotations

import pickle
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from transformers.trainer_callback import TrainerState
from transformers.trainer_pt_utils import safe_globals

from sftplay.launch.checkpoints import read_step
from sftplay.model.source import describe_pickle
from sftplay.train.random_numbers import random_numbers_kept

STATE = "trainer_state.json"

PICKLES = {
    "optimizer.pt": {"state", "param_groups"},
    "optimizer.bin": set(),
    "scheduler.pt": set(),
    "scaler.pt": set(),
    "rng_state*.pth": {"python", "numpy", "cpu"},
    "pytorch_model*.bin": set(),
    "adapter_model.bin": set(),
}
"""The pickles that the Trainer opens when it resumes, and the keys that it must find in them. DeepSpeed keeps its own
in folders."""

PICKLE_ERRORS = (
    pickle.UnpicklingError, RuntimeError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, EOFError,
    OSError, AssertionError, MemoryError, struct.error,
)  # fmt: skip
"""What a forged pickle makes torch.load raise."""


def find_unreadable(checkpoint: Path) -> str:
    """The first file of an undamaged checkpoint that the Trainer could not go on from, and why; empty without one."""
    return next(_problems(checkpoint), "")


def _problems(checkpoint: Path) -> Iterator[str]:
    if problem := _state_problem(checkpoint):
        yield f"{STATE} {problem}"
    for pattern, keys in PICKLES.items():
        for path in sorted(checkpoint.glob(pattern)):
            if problem := _pickle_problem(path, keys):
                yield f"{path.name} {problem}"
    for path in sorted(checkpoint.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt"):
                pass
        except (SafetensorError, OSError):
            yield f"{path.name} holds no tensors that can be read"


def _state_problem(checkpoint: Path) -> str:
    try:
        state = TrainerState.load_from_json(str(checkpoint / STATE))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return "is not what the Trainer writes"
    if type(state.global_step) is not int or state.global_step != read_step(checkpoint):
        return f"is not of step {read_step(checkpoint)}"
    best, callbacks = state.best_model_checkpoint, state.stateful_callbacks
    numbers = (
        *(state.epoch, state.total_flos, state.num_input_tokens_seen, state.max_steps, state.num_train_epochs),
        *(state.logging_steps, state.eval_steps, state.save_steps),
    )
    shapes = (
        isinstance(state.log_history, list) and all(isinstance(line, dict) for line in state.log_history),
        isinstance(callbacks, dict) and "TrainerControl" in callbacks and all(map(_is_callback, callbacks.values())),
        best is None or isinstance(best, str),
        state.best_metric is None or isinstance(state.best_metric, int | float),
        all(isinstance(number, int | float) and number >= 0 for number in numbers),
    )
    return "" if all(shapes) else "is not what the Trainer writes"


def _is_callback(state: Any) -> bool:
    each = state if isinstance(state, list) else [state]
    return all(isinstance(one, dict) and all(isinstance(part, dict) for part in one.values()) for one in each)


def _pickle_problem(path: Path, keys: set[str]) -> str:
    """What is wrong with a pickle. Its tensors are mapped, not read: an optimizer's state may be as large as memory."""
    try:
        with safe_globals():
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except PICKLE_ERRORS as error:
        return describe_pickle(error)
    if not isinstance(content, dict) or not keys <= content.keys():
        return "is not what the Trainer writes"
    return "" if "numpy" not in keys or _are_random_states(content) else "is not what the Trainer writes"


def _are_random_states(content: dict[str, Any]) -> bool:
    try:
        with random_numbers_kept():
            random.setstate(content["python"])
            np.random.set_state(content["numpy"])
            torch.set_rng_state(content["cpu"])
    except PICKLE_ERRORS:
        return False
    return True
