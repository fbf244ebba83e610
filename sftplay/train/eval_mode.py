"""Measure without a trace: no dropout, and the random numbers of this process put back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


class RandomState:
    """The state of this rank's random numbers: Python's, numpy's, torch's on the CPU and on this process's GPU."""

    def __init__(self) -> None:
        self._python, self._numpy = random.getstate(), np.random.get_state()
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None

    def restore(self) -> None:
        """Put the states back."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Inside, anything may use random numbers; those after it are the ones that would have come without it."""
    state = RandomState()
    try:
        yield
    finally:
        state.restore()


@contextmanager
def eval_mode(model: Any) -> Iterator[None]:
    """Keep `model` in evaluation mode inside the block, and put the mode that it had back."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
