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
    that trains. Nothing before the first weight that trains has a gradient. DoRA's norms are left out."""
    if shape.unmodelled:
        return None
    embeddings_train = _trains(execution.adapter, EMBEDDINGS)
    first, first_attention = _count_layer(shape.kinds[0], execution.adapter, reached=embeddings_train)
    head = FORWARD + BACKWARD_INPUT + BACKWARD_WEIGHT * _trains(execution.adapter, HEADS)
    per_token, passes, passes_near = 0.0, 0.0, 0.0
    for kind in shape.kinds:
        later, attention = _count_layer(kind, execution.adapter, reached=True)
        is_first = kind is shape.kinds[0]  # only the first layer may lack a gradient
        per_token += (first if is_first else 0) + (kind.layers - is_first) * later
        near_layers = 0
        if kind.sliding_window is not None:
            # All of them, or all but the last of each pattern (Gemma: 1 of 2 or of 6 sees the whole row).
            whole = 0 if shape.parts or kind.layer_pattern == 1 else kind.layers // kind.layer_pattern
            near_layers = kind.layers - whole
        first_is_near = is_first and near_layers > 0  # a pattern of several kinds of layers ends with one that sees all
        pair = PRODUCTS * kind.heads * kind.head_dim
        near = first_attention * first_is_near + attention * (near_layers - first_is_near)
        passes_near += pair * near
        passes += pair * (first_attention * is_first + attention * (kind.layers - is_first) - near)
    outside, _ = _products(shape.linears_outside, execution.adapter, reached=embeddings_train)
    return ModelFlops(
        per_token=per_token + outside,
        per_label_token=float(head * shape.head_params),
        per_pair=float(passes),
        per_near_pair=float(passes_near),
        window=shape.sliding_window,
    )


def _count_layer(shape: ModelShape, adapter: Adapter | None, *, reached: bool) -> tuple[float, int]:
    """Operations a token of one layer in products with weights, and for each multiplication of attention's forward
    products; `reached` says whether the layer's input has a gradient."""
    *inward, outward = [linear for linear in shape.linears if not linear.is_mlp]
    mlp = [linear for linear in shape.linears if linear.is_mlp]
    total, flows = _products(inward, adapter, reached=reached)
    # Gradients of queries, keys and values, where one flows; those of queries and keys need that of the scores.
    flowing = [linear.name for linear in inward if _products([linear], adapter, reached=reached)[1]]
    wanted = {letter for name in flowing for letter in (name[0] if name in ("q_proj", "k_proj", "v_proj") else "qkv")}
    attention = FORWARD + BACKWARD_INPUT // PRODUCTS * (len(wanted) + (not wanted.isdisjoint("qk")))
    if (rule := shape.mixer) is not None:
        # The recurrence itself: a head's state is read by a key, written by one, and read by a query.
        total += 3 * attention * rule.heads * rule.key_dim * rule.value_dim
        attention = 0
    for n, linears in enumerate(([outward], mlp[:-1], mlp[-1:])):
        if n == 1 and shape.parallel_block:
            flows = reached
        more, flows = _products(linears, adapter, reached=flows)
        total += more
    if (routed := shape.routed) is not None:
        passes = FORWARD + BACKWARD_INPUT * flows + BACKWARD_WEIGHT * (adapter is None)
        total += passes * (routed.params * routed.chosen / shape.experts + shape.experts * shape.hidden)
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
