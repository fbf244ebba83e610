"""What a LoRA pair keeps of its linear's input, and what PEFT's casts and dropout hold while it runs."""

from __future__ import annotations

from dataclasses import dataclass

from sftplay.plan.memory.memory_setup import Adapter, MemorySetup
from sftplay.plan.shape.model_shape import Linear

MASK = 1
"""Bytes of one element of a dropout mask."""


def pair_input_bytes(execution: MemorySetup, adapter: Adapter, *, into: int) -> int:
    """Bytes of an input element that one pair keeps for itself; 0 when it shares the base's copy."""
    if execution.has_autocast:
        is_own, kept = (
            is_cast_first(execution, adapter, into=into) or into != execution.compute_bytes,
            execution.compute_bytes,
        )
    else:
        is_own, kept = is_cast_first(execution, adapter, into=into), adapter.weight_bytes
    if adapter.has_dropout:
        return kept + MASK
    return kept if is_own else 0


def is_cast_first(execution: MemorySetup, adapter: Adapter, *, into: int) -> bool:
    """Whether PEFT turns a pair's input into the pair's dtype first; not beside a 4-bit base under autocast
    (peft 0.21, `lora/bnb.py`, `requires_conversion`)."""
    return adapter.weight_bytes != into and not (execution.four_bit and execution.has_autocast)


def pair_kept(execution: MemorySetup, adapter: Adapter, *, linear: Linear, into: int) -> float:
    """Bytes a token kept beside the input: the narrow product, and DoRA's two wide ones."""
    narrow = execution.compute_bytes if execution.has_autocast else adapter.weight_bytes
    wide = (into if not execution.has_autocast else execution.compute_bytes) + narrow
    return adapter.rank * narrow + (linear.outputs * wide if adapter.is_dora else 0)


@dataclass(frozen=True)
class PairMoments:
    """Bytes per token and unit of the MLP's width, beside what is kept, where its output is made and differentiated."""

    forward: float
    pair: float
    released: float
    """Of what was kept, gone when the output projection has been differentiated."""


def pair_moments(execution: MemorySetup, adapter: Adapter, *, into: int, is_fused: bool) -> PairMoments:
    """Around a pair whose input is `into` bytes an element: its casts, dropout, and their way back."""
    own = pair_input_bytes(execution, adapter, into=into)
    narrow = execution.compute_bytes if execution.has_autocast else adapter.weight_bytes
    is_cast = is_cast_first(execution, adapter, into=into)
    wide = adapter.weight_bytes if is_cast else into
    # PEFT holds the cast input, and what dropout made of it, while the product rounds them to the kept copy.
    forward = (into if own else 0) + (wide if is_cast and execution.has_autocast else 0)
    if adapter.has_dropout and wide != narrow:
        forward += wide
    # In the up projection: the base's product, the pair's and its scaled copy, when what comes after is not there yet.
    up, later = (2 * (into + 2 * narrow), 3 * into) if is_fused else (into + 2 * narrow, into)
    forward = max(forward, up - later - (own or into))
    copy = own - MASK if adapter.has_dropout else own or into
    back = 2 * wide if adapter.has_dropout else max(narrow, wide if is_cast else 0) + min(into, narrow) * is_cast
    return PairMoments(forward, max(narrow, back - copy), own or into)
