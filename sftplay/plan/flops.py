"""Model FLOPs: the multiplications and additions that training a row needs, whoever computes them.

What an execution adds is not counted: padding, scores of tokens without a label, recomputation under gradient
checkpointing or in a fused kernel, the optimizer, and all that is no matrix product. So a share of a card's peak that
follows from it (MFU: PaLM, Chowdhery 2022, appendix B) never grows by work that trains nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sftplay.plan.memory_setup import Adapter, MemorySetup
    from sftplay.plan.shape import Linear, ModelShape

FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = 2, 2, 2
"""Operations a weight and token: a multiplication and an addition each."""

PRODUCTS = 2  # of attention: queries with keys, and weights with values

# What transformers' models call them, as modules_to_save may name them.
EMBEDDINGS, HEADS = ("embed_tokens", "embed_in", "wte", "word_embeddings"), ("lm_head", "embed_out")


@dataclass(frozen=True, kw_only=True)
class ModelFlops:
    """Operations of one forward and one backward pass, by what they grow with."""

    per_token: float  # the layers' linears, adapters and weight gradients included
    per_label_token: float  # the head, which only a token with a label needs; the usual 6 N counts it for every token
    per_pair: float  # attention of all layers that see the whole row, for a query and one key that it sees
    per_near_pair: float  # the same of all layers with a sliding window
    window: int | None  # keys that a query sees in layers with a sliding window, itself included

    def of_rows(self, lengths: Iterable[int], label_tokens: int) -> float:
        """Count the operations of rows of so many real tokens, `label_tokens` of all of them learned."""
        lengths = list(lengths)
        pairs = sum(seen_pairs(n) for n in lengths)
        near = sum(seen_pairs(n, self.window) for n in lengths) if self.per_near_pair else 0
        return self.of_counts(sum(lengths), label_tokens, pairs=(pairs, near))

    def of_counts(self, tokens: int, label_tokens: int, *, pairs: tuple[int, int]) -> float:
        """Count the operations of so many tokens and, in layers without and with a window, pairs of query and key."""
        products = self.per_pair * pairs[0] + self.per_near_pair * pairs[1]
        return self.per_token * tokens + self.per_label_token * label_tokens + products


def seen_pairs(tokens: int, window: int | None = None) -> int:
    """Count the pairs of a query and a key not behind it in a row of `tokens`, with at most `window` keys a query."""
    full = min(tokens, window or tokens)
    return full * (full + 1) // 2 + (tokens - full) * full


def model_flops(shape: ModelShape, execution: MemorySetup) -> ModelFlops | None:
    """Count the operations of a model of this shape; None where the shape leaves parts of the model out.

    A product takes 2 operations a weight forward, 2 for the gradient of its input, and 2 for that of its weight where
    that trains. Nothing before the first weight that trains has a gradient. DoRA's norms are left out.
    """
    if shape.unmodelled:
        return None
    first, first_attention = _count_layer(shape, execution.adapter, reached=_trains(execution.adapter, EMBEDDINGS))
    later, attention = _count_layer(shape, execution.adapter, reached=True)
    head = FORWARD + BACKWARD_INPUT + BACKWARD_WEIGHT * _trains(execution.adapter, HEADS)
    near_layers = 0
    if shape.sliding_window is not None:
        # All of them, or all but the last of each pattern (Gemma: 1 of 2 or of 6 sees the whole row).
        whole = 0 if shape.layer_pattern == 1 else shape.layers // shape.layer_pattern
        near_layers = shape.layers - whole
    # Only the first layer may lack a gradient; a pattern of several kinds of layers ends with one that sees all.
    first_is_near = near_layers > 0
    pair = PRODUCTS * shape.heads * shape.head_dim
    passes_near = first_attention * first_is_near + attention * (near_layers - first_is_near)
    passes = first_attention + attention * (shape.layers - 1) - passes_near
    return ModelFlops(
        per_token=first + (shape.layers - 1) * later,
        per_label_token=float(head * shape.vocab * shape.hidden),
        per_pair=float(pair * passes),
        per_near_pair=float(pair * passes_near),
        window=shape.sliding_window,
    )


def _count_layer(shape: ModelShape, adapter: Adapter | None, *, reached: bool) -> tuple[float, int]:
    """Operations a token of one layer in products with weights, and for each multiplication of attention's forward
    products; `reached` says whether the layer's input has a gradient."""
    *inward, outward = [linear for linear in shape.linears if not linear.is_mlp]
    *up, down = [linear for linear in shape.linears if linear.is_mlp]
    total, flows = _products(inward, adapter, reached=reached)
    attention = FORWARD + (2 * BACKWARD_INPUT if flows else 0)  # a product of two inputs has two gradients
    for linears in ([outward], up, [down]):
        if linears is up and shape.parallel_block:
            flows = reached
        more, flows = _products(linears, adapter, reached=flows)
        total += more
    return total, attention


def _products(linears: Sequence[Linear], adapter: Adapter | None, *, reached: bool) -> tuple[float, bool]:
    """Operations a token of linears that share an input, and whether what they give has a gradient."""
    total = 0.0
    flows = reached
    for linear in linears:
        weights = linear.inputs * linear.outputs
        backward = BACKWARD_INPUT * reached
        if _trains(adapter, (linear.name,)):
            total += (FORWARD + backward + BACKWARD_WEIGHT) * weights
            flows = True
            continue
        total += (FORWARD + backward) * weights
        if adapter is not None and adapter.covers(linear):
            narrow, wide = adapter.rank * linear.inputs, adapter.rank * linear.outputs
            total += (FORWARD + backward + BACKWARD_WEIGHT) * narrow
            total += (FORWARD + BACKWARD_INPUT + BACKWARD_WEIGHT) * wide
            flows = True
    return total, flows


def _trains(adapter: Adapter | None, names: Sequence[str]) -> bool:
    """True when the weights of a module of one of these names train themselves."""
    return adapter is None or any(saved.rpartition(".")[2] in names for saved in adapter.in_full)
