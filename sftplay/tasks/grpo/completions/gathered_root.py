"""Lets a model with an adapter generate where FSDP shards it.

FSDP gathers the weights outside the layers (embedding, last norm, head) when the outermost module is called. PEFT's
`generate` calls the base inside it, so these weights would stay in shards (torch 2.13, peft 0.21).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def gathered_root(model: Any) -> Iterator[None]:
    """Meanwhile every rank holds the weights outside the layers of `model`, where FSDP shards one with an adapter."""
    if not (hasattr(model, "unshard") and hasattr(model, "peft_config")):
        yield
        return
    model._get_fsdp_state()._lazy_init()  # else the first layer that is called would take itself for the outermost
    model.unshard()
    try:
        yield
    finally:
        model.reshard()
