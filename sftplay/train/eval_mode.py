"""Evaluation mode for a while: a model then answers without dropout, as it would after the training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def eval_mode(model: Any) -> Iterator[None]:
    """Keep `model` in evaluation mode inside the block, and put the mode that it had back."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
