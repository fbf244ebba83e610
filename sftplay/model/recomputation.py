"""Recomputation of activations, also called gradient checkpointing, by the words of the installed transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

PLAIN_RECOMPUTATION = {"use_reentrant": False}
"""For `torch.utils.checkpoint`: the kind that goes with frozen weights and with DDP."""


@cache
def recomputation() -> str:
    """The word for recomputing activations in transformers; new releases warn of the one they had before."""
    from transformers import TrainingArguments

    new = "activation_checkpointing"
    return new if new in TrainingArguments.__dataclass_fields__ else "gradient_checkpointing"


def as_named_here(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a TrainingArguments by their names of today. It takes old names too, and ignores them next to new
    ones."""
    return {name.replace("gradient_checkpointing", recomputation()): value for name, value in arguments.items()}


def recomputation_arguments(*, recomputes: bool) -> dict[str, Any]:
    """The arguments of a TrainingArguments that switch it on or off."""
    word = recomputation()
    return {word: recomputes, f"{word}_kwargs": dict(PLAIN_RECOMPUTATION) if recomputes else None}


def is_recomputing(model: Any) -> bool:
    """True when a model of transformers recomputes its activations; False for any other model."""
    return bool(getattr(model, f"is_{recomputation()}", False))


def recompute(model: Any) -> None:
    """Let a model of transformers compute its layers anew in backward passes."""
    word = recomputation()
    getattr(model, f"{word}_enable")(**{f"{word}_kwargs": dict(PLAIN_RECOMPUTATION)})


@contextmanager
def nothing_recomputed(model: Any) -> Iterator[None]:
    """The model without recomputation, which a cache does not go with; switched on again afterwards if it was on."""
    was_on = is_recomputing(model)
    if was_on:
        getattr(model, f"{recomputation()}_disable")()
    try:
        yield
    finally:
        if was_on:
            recompute(model)
