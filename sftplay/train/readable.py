"""Checks whether the Trainer can go on from a checkpoint before it tries, so that an older one may be taken.

A marker says that no file has changed since it was written. It does not say that the files make sense.
"""

from __future__ import annotations

import pickle
import random
import struct
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

STATE, ODD = "trainer_state.json", "is not what the Trainer writes"

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
"""Errors of torch.load on a forged pickle."""


def find_unreadable(checkpoint: Path) -> str:
    """Return the first file of an undamaged checkpoint that the Trainer could not go on from, and why; empty without.

    Tensors of pickles are mapped, not read: an optimizer's state may be as large as memory.
    """
    if problem := _find_state_problem(checkpoint):
        return f"{STATE} {problem}"
    for pattern, keys in PICKLES.items():
        for path in sorted(checkpoint.glob(pattern)):
            try:
                with safe_globals():
                    content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except PICKLE_ERRORS as error:
                return f"{path.name} {describe_pickle(error)}"
            is_whole = isinstance(content, dict) and keys <= content.keys()
            if not is_whole or ("numpy" in keys and not _are_random_states(content)):
                return f"{path.name} {ODD}"
    for path in sorted(checkpoint.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt"):
                pass
        except (SafetensorError, OSError):
            return f"{path.name} holds no tensors that can be read"
    return ""


def _find_state_problem(checkpoint: Path) -> str:
    try:
        state = TrainerState.load_from_json(str(checkpoint / STATE))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return ODD
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
    return "" if all(shapes) else ODD


def _is_callback(state: Any) -> bool:
    parts = state if isinstance(state, list) else [state]
    return all(isinstance(part, dict) and all(isinstance(value, dict) for value in part.values()) for part in parts)


def _are_random_states(content: dict[str, Any]) -> bool:
    try:
        with random_numbers_kept():
            random.setstate(content["python"])
            np.random.set_state(content["numpy"])
            torch.set_rng_state(content["cpu"])
    except PICKLE_ERRORS:
        return False
    return True
