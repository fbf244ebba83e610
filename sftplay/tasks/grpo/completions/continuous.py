"""Continuous batching of transformers: a cache as large as a drawing needs, and weights that stay what they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def dtypes_kept(args: Any, device: torch.device) -> Iterator[None]:
    """Inside, TRL does not turn the model to 16 bits before it generates; the model computes in its weights' dtypes.

    TRL would turn all of it, and for good: what trains in fp32, and the angles of the rotation (trl 1.16,
    `_generate_single_turn`).
    """
    before = args.bf16, args.fp16
    args.bf16 = args.fp16 = False
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        args.bf16, args.fp16 = before
