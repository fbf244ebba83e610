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
"""fp32 copies of a tile where torch folds it, instead of a kernel (ibid., `_forward_tile` and `_backward_tile`)."""

TOKEN_SUMS = 9  # fp32 numbers a token next to the tile: running maxima, sums, and what is made of them (ibid.)


def head_in_forward(shape: ModelShape, setup: MemorySetup, *, tokens: int, labelled: int) -> float:
    """Count the bytes alive when the loss has just been computed, for `tokens`, `labelled` of them with a label."""
    norm = tokens * (norm_kept(shape, setup) + norm_out_bytes(shape, setup) * shape.hidden)
    if setup.head == "tiled":
        return norm + _tiles(shape, setup, labelled=labelled, copies=FORWARD_COPIES)
    if setup.head == "actions":
        # The reference's last states are there while the model's are computed.
        reference = tokens * shape.hidden * setup.stream_bytes
        return norm + reference + _rounded_head(shape, setup) + _action_scores(shape, setup, labelled=labelled)
    fp32_copy = 0 if setup.logits_bytes == FP32 else FP32
    per_score = setup.logits_bytes + fp32_copy + (FP32 if setup.shifts_scores else 0) + FP32
    scores = _scores(shape, setup, labelled=labelled, per_score=per_score, in_chunk=2 * FP32)
    return norm + _rounded_head(shape, setup) + copied_end(shape, setup) + scores


def head_in_backward(shape: ModelShape, setup: MemorySetup, *, tokens: int, labelled: int) -> float:
    """Count the bytes alive in the loss's backward, or in that of the head's own weight where it trains."""
    norm, size = tokens * norm_kept(shape, setup), shape.vocab * shape.hidden
    if setup.head == "tiled":
        # Sums of the gradients are fp32, and then get the dtype of what they are gradients of.
        trains = setup.trains_all or "lm_head" in (setup.adapter.in_full if setup.adapter else ())
        hidden = labelled * shape.hidden * (FP32 + norm_out_bytes(shape, setup))
        tiles = _tiles(shape, setup, labelled=labelled, copies=BACKWARD_COPIES)
        return norm + (size * FP32 if trains else 0) + hidden + tiles
    rounded, so_far = _rounded_head(shape, setup), size * setup.weight_bytes
    if setup.head == "actions":
        scores = _action_scores(shape, setup, labelled=labelled)
        if not setup.trains_all:
            return norm + scores
        # The head's gradient is added up over the chunks.
        kept = scores - ACTION_COPIES * FP32 * _action_chunk(shape, labelled)
        if labelled <= CHUNK_SCORES // shape.vocab:
            return norm + max(scores + rounded, kept + size * (setup.compute_bytes + setup.weight_bytes))
        return norm + max(so_far + scores + rounded, 3 * so_far + kept)
    held = setup.logits_bytes if setup.holds_scores else 0
    # Its log-softmax, which autograd saves, the gradient of that, and of what went in: all fp32
    # (torch, `_log_softmax_backward_data`).
    loss = rounded + _scores(shape, setup, labelled=labelled, per_score=held + 3 * FP32, in_chunk=3 * FP32)
    if not setup.trains_all and not setup.trains_rows:
        return norm + loss
    norm += copied_end(shape, setup)
    # The weight's gradient is made in the product's dtype and then in the weight's own.
    in_chunk = 3 * FP32 if setup.trains_all else setup.compute_bytes
    scores = _scores(shape, setup, labelled=labelled, per_score=held + setup.logits_bytes, in_chunk=in_chunk)
    product = rounded + scores + size * setup.compute_bytes
    cast = size * (setup.compute_bytes + setup.weight_bytes) if rounded else 0
    if setup.head != "chunked" or labelled <= setup.chunk_tokens:
        return norm + max(loss, product, cast)
    # A loss in chunks adds up the weight's gradient over them. The first two are transposed views, which autograd's
    # engine does not add to in place.
    return norm + max(so_far + max(loss, product, cast), 3 * so_far + _kept_for_chunks(shape, labelled))


def copied_end(shape: ModelShape, setup: MemorySetup) -> float:
    """Count the copy of the head, or of the embedding, into which rows of new tokens are put; its gradient is as
    large."""
    return float(shape.vocab * shape.hidden * setup.weight_bytes) if setup.trains_rows else 0.0


def reference_scores(shape: ModelShape, setup: MemorySetup, *, tokens: int, labelled: int) -> float:
    """Count last states and log-probabilities of a reference that compares for a model on another device."""
    states = (tokens + labelled) * shape.hidden * setup.stream_bytes
    return float(states + 2 * FP32 * _action_chunk(shape, labelled)) + _rounded_head(shape, setup)


def _scores(shape: ModelShape, setup: MemorySetup, *, labelled: int, per_score: int, in_chunk: int) -> float:
    """Bytes of the scores over the vocabulary that exist at once, with what a chunked loss keeps for all tokens.

    `in_chunk` is the bytes of a score in a chunk, whose 16-bit scores are gone by then.
    """
    if shape.softcap_final:  # its tanh is saved
        per_score, in_chunk = per_score + setup.logits_bytes, in_chunk + FP32
    if setup.head == "standard":
        return float(labelled * shape.vocab * per_score)
    if setup.head == "chunked":
        chunk = min(labelled, setup.chunk_tokens) * shape.vocab
        out, rounded, widened = norm_out_bytes(shape, setup), 0.0, 0.0
        if out != setup.weight_bytes and setup.weight_bytes == setup.compute_bytes:
            # A 16-bit head is widened to hidden states that a layer norm made fp32, and autocast rounds it back.
            rounded = float(setup.compute_bytes * shape.vocab * shape.hidden)
            widened = out * shape.vocab * shape.hidden + setup.compute_bytes * chunk
        return rounded + max(in_chunk * chunk, widened) + _kept_for_chunks(shape, labelled)
    # Tokens per chunk of Liger's fused loss (liger-kernel, `fused_linear_cross_entropy_forward`).
    chunk = -(-labelled // -(-shape.vocab // shape.hidden))
    tokens = min(labelled, 1 << (chunk - 1).bit_length() if chunk > 1 else 1)
    return float(tokens * shape.vocab * per_score) + labelled * shape.hidden * setup.compute_bytes


def _action_scores(shape: ModelShape, setup: MemorySetup, *, labelled: int) -> float:
    """A chunk of scores, and the last states of actions, the model's and the reference's, in the order of chunks."""
    states = 2 * labelled * shape.hidden * setup.stream_bytes
    return float(ACTION_COPIES * FP32 * _action_chunk(shape, labelled) + states)


def _action_chunk(shape: ModelShape, labelled: int) -> int:
    return min(labelled, max(1, CHUNK_SCORES // shape.vocab)) * shape.vocab


def _tiles(shape: ModelShape, setup: MemorySetup, *, labelled: int, copies: int) -> float:
    """One tile of scores with what it is computed of, and the numbers of every token."""
    rows, columns = min(labelled, TILE_TOKENS), min(shape.vocab, TILE_VOCAB)
    out = norm_out_bytes(shape, setup)
    tile = rows * columns * (setup.compute_bytes + (0 if setup.folds_tiles else copies * FP32))
    rounded = columns if setup.weight_bytes != setup.compute_bytes else 0
    rounded += rows if out != setup.compute_bytes else 0
    chosen = labelled * shape.hidden * out  # the hidden states of completions alone
    return float(tile + rounded * shape.hidden * setup.compute_bytes + chosen + TOKEN_SUMS * FP32 * labelled)


def _kept_for_chunks(shape: ModelShape, labelled: int) -> float:
    """The hidden states in the order of the chunks, and their gradient so far."""
    return float(labelled * shape.hidden * FP32)


def _rounded_head(shape: ModelShape, setup: MemorySetup) -> float:
    """The head's weight as the product takes it, where autocast rounds it."""
    if not setup.has_autocast or setup.weight_bytes == setup.compute_bytes:
        return 0.0
    return float(setup.compute_bytes * shape.vocab * shape.hidden)
