"""What the last norm, the output head and the loss hold at their fullest."""

from __future__ import annotations

from sftplay.plan.memory.layer import FP32, norm_kept, norm_out_bytes
from sftplay.plan.memory.memory_setup import MemorySetup
from sftplay.plan.shape.model_shape import ModelShape

CHUNK_SCORES = 2**24
"""Scores over the vocabulary that exist at a time where actions are learned from (`tasks.score.scoring`):
64 MiB in fp32."""

ACTION_COPIES = 5
"""fp32 copies of such a chunk: log-probabilities of model and reference, probabilities, their difference, the product;
as many in the backward pass (`_token_scores`, full KL)."""

TILE_TOKENS, TILE_VOCAB = 4096, 32_768
"""Scores that exist at a time where log-probabilities are taken in tiles (trl 1.16, `kernels/chunked_logprob.py` and
`_CHUNKED_LOGPROB_CHUNK_SIZE`, which `tasks.grpo.rollouts` lowers to a smaller vocabulary)."""

FORWARD_COPIES, BACKWARD_COPIES = 3, 7
"""fp32 copies of a tile where torch folds it, in place of a kernel (ibid., `_forward_tile` and `_backward_tile`)."""

TOKEN_SUMS = 9
"""fp32 numbers a token beside the tile: running maxima, sums, and what is made of them (ibid.)."""


def head_in_forward(shape: ModelShape, execution: MemorySetup, *, tokens: int, labelled: int) -> float:
    """Bytes alive when the loss has just been computed, for `tokens` of which `labelled` carry a label."""
    out = norm_out_bytes(shape, execution)
    norm = tokens * (norm_kept(shape, execution) + out * shape.hidden)
    if execution.head == "tiled":
        return norm + _tiles(shape, execution, labelled=labelled, copies=FORWARD_COPIES)
    if execution.head == "actions":
        # The reference's last states are there while the model's are computed.
        beside = tokens * shape.hidden * execution.stream_bytes
        return norm + beside + _rounded_head(shape, execution) + _action_scores(shape, execution, labelled=labelled)
    fp32_copy = 0 if execution.logits_bytes == FP32 else FP32
    shifted = FP32 if execution.shifts_scores else 0
    per_score = execution.logits_bytes + fp32_copy + shifted + FP32
    scores = _scores(shape, execution, labelled=labelled, per_score=per_score, in_chunk=2 * FP32)
    return norm + _rounded_head(shape, execution) + copied_end(shape, execution) + scores


def head_in_backward(shape: ModelShape, execution: MemorySetup, *, tokens: int, labelled: int) -> float:
    """Bytes alive in the loss's backward, or in that of the head's own weight where it trains."""
    norm = tokens * norm_kept(shape, execution)
    if execution.head == "tiled":
        # Sums of the gradients are fp32, and then get the dtype of what they are gradients of.
        trains = execution.trains_all or "lm_head" in (execution.adapter.in_full if execution.adapter else ())
        weight = shape.vocab * shape.hidden * FP32 if trains else 0
        hidden = labelled * shape.hidden * (FP32 + norm_out_bytes(shape, execution))
        return norm + weight + hidden + _tiles(shape, execution, labelled=labelled, copies=BACKWARD_COPIES)
    if execution.head == "actions":
        return norm + _actions_in_backward(shape, execution, labelled=labelled)
    held = execution.logits_bytes if execution.holds_scores else 0
    rounded = _rounded_head(shape, execution)
    # Its log-softmax, which autograd saves, the gradient of that, and of what went in: all fp32
    # (torch, `_log_softmax_backward_data`).
    loss = rounded + _scores(shape, execution, labelled=labelled, per_score=held + 3 * FP32, in_chunk=3 * FP32)
    if not execution.trains_all and not execution.trains_rows:
        return norm + loss
    norm += copied_end(shape, execution)
    # The weight's gradient is made in the product's dtype and then in the weight's own.
    size = shape.vocab * shape.hidden
    in_chunk = 3 * FP32 if execution.trains_all else execution.compute_bytes
    product = (
        rounded
        + _scores(shape, execution, labelled=labelled, per_score=held + execution.logits_bytes, in_chunk=in_chunk)
        + size * execution.compute_bytes
    )
    cast = size * (execution.compute_bytes + execution.weight_bytes) if rounded else 0
    if execution.head != "chunked" or labelled <= execution.chunk_tokens:
        return norm + max(loss, product, cast)
    # A loss in chunks adds up the weight's gradient over them. The first two are transposed views, which autograd's
    # engine does not add to in place.
    so_far = size * execution.weight_bytes
    return norm + max(so_far + max(loss, product, cast), 3 * so_far + _kept_for_chunks(shape, labelled))


def copied_end(shape: ModelShape, execution: MemorySetup) -> float:
    """The copy of the head, or of the embedding, into which rows of new tokens are put; its gradient is as large."""
    return float(shape.vocab * shape.hidden * execution.weight_bytes) if execution.trains_rows else 0.0


def _scores(shape: ModelShape, execution: MemorySetup, *, labelled: int, per_score: int, in_chunk: int) -> float:
    """Of the scores over the vocabulary that exist at once, with what a chunked loss keeps for all tokens.

    `in_chunk` is the bytes of a score in a chunk, whose 16-bit scores are gone by then.
    """
    per_score += execution.logits_bytes if shape.softcap_final else 0  # its tanh is saved
    if execution.head == "standard":
        return float(labelled * shape.vocab * per_score)
    if execution.head == "chunked":
        chunk = min(labelled, execution.chunk_tokens) * shape.vocab
        rounded = _rounded_for_chunks(shape, execution)
        widened = (
            norm_out_bytes(shape, execution) * shape.vocab * shape.hidden + execution.compute_bytes * chunk
            if rounded
            else 0
        )
        scores = (in_chunk + (FP32 if shape.softcap_final else 0)) * chunk  # its tanh is saved
        return rounded + max(scores, widened) + _kept_for_chunks(shape, labelled)
    return (
        float(liger_chunk(shape, labelled) * shape.vocab * per_score)
        + labelled * shape.hidden * execution.compute_bytes
    )


def reference_scores(shape: ModelShape, execution: MemorySetup, *, tokens: int, labelled: int) -> float:
    """Last states and log-probabilities of a reference that compares for a model on another device."""
    states = (tokens + labelled) * shape.hidden * execution.stream_bytes
    return float(states + 2 * FP32 * _action_chunk(shape, labelled)) + _rounded_head(shape, execution)


def _actions_in_backward(shape: ModelShape, execution: MemorySetup, *, labelled: int) -> float:
    """As in the forward pass; where the head trains, its gradient is added up over the chunks."""
    scores = _action_scores(shape, execution, labelled=labelled)
    if not execution.trains_all:
        return scores
    size, rounded = shape.vocab * shape.hidden, _rounded_head(shape, execution)
    kept = scores - ACTION_COPIES * FP32 * _action_chunk(shape, labelled)
    if labelled <= CHUNK_SCORES // shape.vocab:
        return max(scores + rounded, kept + size * (execution.compute_bytes + execution.weight_bytes))
    so_far = size * execution.weight_bytes
    return max(so_far + scores + rounded, 3 * so_far + kept)


def _action_scores(shape: ModelShape, execution: MemorySetup, *, labelled: int) -> float:
    """A chunk of scores, and the last states of actions, the model's and the reference's, in the order of chunks."""
    states = 2 * labelled * shape.hidden * execution.stream_bytes
    return float(ACTION_COPIES * FP32 * _action_chunk(shape, labelled) + states)


def _action_chunk(shape: ModelShape, labelled: int) -> int:
    return min(labelled, max(1, CHUNK_SCORES // shape.vocab)) * shape.vocab


def _tiles(shape: ModelShape, execution: MemorySetup, *, labelled: int, copies: int) -> float:
    """One tile of scores with what it is computed of, and the numbers of every token."""
    rows, columns = min(labelled, TILE_TOKENS), min(shape.vocab, TILE_VOCAB)
    out = norm_out_bytes(shape, execution)
    tile = rows * columns * execution.compute_bytes
    if not execution.folds_tiles:
        tile = rows * columns * (execution.compute_bytes + copies * FP32)
    rounded = (columns if execution.weight_bytes != execution.compute_bytes else 0) + (
        rows if out != execution.compute_bytes else 0
    )
    chosen = labelled * shape.hidden * out  # the hidden states of completions alone
    return float(tile + rounded * shape.hidden * execution.compute_bytes + chosen + TOKEN_SUMS * FP32 * labelled)


def _kept_for_chunks(shape: ModelShape, labelled: int) -> float:
    """The hidden states in the order of the chunks, and their gradient so far."""
    return float(labelled * shape.hidden * FP32)


def _rounded_for_chunks(shape: ModelShape, execution: MemorySetup) -> float:
    """A 16-bit head is widened to hidden states that a layer norm made fp32, and autocast rounds it back."""
    if norm_out_bytes(shape, execution) == execution.weight_bytes or execution.weight_bytes != execution.compute_bytes:
        return 0.0
    return float(execution.compute_bytes * shape.vocab * shape.hidden)


def liger_chunk(shape: ModelShape, labelled: int) -> int:
    """Tokens per chunk of Liger's fused loss (liger-kernel, `fused_linear_cross_entropy_forward`)."""
    chunks = -(-shape.vocab // shape.hidden)
    chunk = -(-labelled // chunks)
    return min(labelled, 1 << (chunk - 1).bit_length() if chunk > 1 else 1)


def _rounded_head(shape: ModelShape, execution: MemorySetup) -> float:
    """The head's weight as the product takes it, where autocast rounds it."""
    if not execution.has_autocast or execution.weight_bytes == execution.compute_bytes:
        return 0.0
    return float(execution.compute_bytes * shape.vocab * shape.hidden)
