"""Memory of a decoder layer, its adapters, the output head and the loss in a step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sftplay.plan.memory_setup import Adapter, MemorySetup
from sftplay.plan.shape import Linear, ModelShape

MASK = 1  # bytes of one element of a dropout mask

FP32 = 4
NF4_BLOCK = 64  # weights to a scale (QLoRA, Dettmers 2023, section 3)

COMPOSED = ("gelu_new",)
"""Activations that transformers writes out in elementary operations; four of them keep what they read or made: the
cube's input, tanh, 1 + tanh and x / 2. Under autocast the cube and what follows are fp32 (torch, autocast's list)."""

UNROTATED = ("gpt2", "gpt_bigcode", "mpt", "bloom")  # families without rotation of queries and keys

POST_NORMED = ("olmo2", "olmo3")  # families with two norms in a layer, both behind attention and MLP

SCALED_IN_FP32 = ("gemma4_text", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Families whose norms of queries and keys are rounded after their scale is applied, not before."""

WITH_SINKS = ("gpt_oss",)
"""Families whose softmax has one more score a head and keeps the dtype of the scores, under autocast too."""

CONCATENATED = ("phi3", "phi", "gpt_neox", "stablelm")
"""Families whose rotation ends in a concatenation, so that the product's output has to be laid out anew afterwards."""


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of one layer: kept from forward to backward, and the most that backward adds to them."""

    kept: float
    transient: float
    kept_without_mlp: float
    transient_attention: float

    @property
    def peak(self) -> float:
        """The most while backward runs through the layer."""
        return max(self.kept + self.transient, self.kept_without_mlp + self.transient_attention)


def layer_bytes(shape: ModelShape, setup: MemorySetup, *, tokens: int, seq: int) -> LayerBytes:
    """Count the bytes of one layer for a micro-batch of `tokens` in rows of `seq`."""
    inner, stream = inner_bytes(shape, setup), stream_bytes(shape, setup)
    mlp = _mlp_kept(shape, setup) * tokens + _rounded_bytes(shape, setup, of_mlp=True)
    rest = (_norms_kept(shape, setup) + _attention_kept(shape, setup, seq=seq)) * tokens
    rest += _rounded_bytes(shape, setup, of_mlp=False)
    # Per token: the gradient of the stream, and its rounded copy that enters the branch.
    gradient = shape.hidden * (stream + (inner if inner != stream else 0))
    return LayerBytes(
        kept=mlp + rest,
        transient=_mlp_transient(shape, setup, tokens=tokens) + gradient * tokens,
        kept_without_mlp=rest,
        transient_attention=(_attention_transient(shape, setup, seq=seq) + gradient) * tokens,
    )


def stream_bytes(shape: ModelShape, setup: MemorySetup) -> int:
    """Bytes of a number in the stream: fp32 where 4-bit layers answer a layer norm's fp32 under autocast."""
    return max(setup.stream_bytes, inner_bytes(shape, setup)) if setup.four_bit else setup.stream_bytes


def norm_out_bytes(shape: ModelShape, setup: MemorySetup) -> int:
    """Bytes of a number that a norm writes: a layer norm writes fp32 under autocast, an RMS norm the stream's dtype."""
    return FP32 if shape.norm == "layer" and setup.has_autocast else setup.stream_bytes


def inner_bytes(shape: ModelShape, setup: MemorySetup) -> int:
    """Bytes of a number that a linear writes; a 4-bit one writes its input's dtype (bitsandbytes, `Linear4bit`)."""
    into = norm_out_bytes(shape, setup)
    return setup.compute_bytes if setup.has_autocast and not (setup.four_bit and into == FP32) else into


def norm_kept(shape: ModelShape, setup: MemorySetup) -> float:
    """Bytes a token that one norm over the stream keeps."""
    if shape.norm == "layer":
        # torch saves the input, which autocast has copied to fp32.
        return shape.hidden * (FP32 if setup.has_autocast else stream_bytes(shape, setup))
    return shape.hidden * (FP32 + (setup.stream_bytes if setup.trains_all else 0))


def _norms_kept(shape: ModelShape, setup: MemorySetup) -> float:
    kept = copies_of_stream(shape, setup) * norm_kept(shape, setup)
    if shape.qk_norm:
        widths = shape.heads * shape.head_dim + shape.kv_heads * shape.head_dim
        scaled = FP32 if shape.family in SCALED_IN_FP32 else inner_bytes(shape, setup)
        kept += widths * (FP32 + (scaled if setup.trains_all else 0))
        kept += FP32 * shape.kv_heads * shape.head_dim if shape.family == "gemma4_text" else 0  # values are normed too
    return kept


def norm_moment(shape: ModelShape) -> float:
    """Bytes a token that the backward of one norm over the stream adds to what the norm kept."""
    # An RMS norm is written in elementary operations, five of whose fp32 gradients are alive at once.
    return shape.hidden * FP32 * (5 if shape.norm == "rms" else 2)


def copies_of_stream(shape: ModelShape, setup: MemorySetup) -> int:
    """Tensors that a layer's norms keep: norms of a parallel block read the same stream, and where it is fp32 they keep
    it itself and not a copy each."""
    return 1 if shape.parallel_block and stream_bytes(shape, setup) == FP32 else shape.norms_per_layer


def _attention_kept(shape: ModelShape, setup: MemorySetup, *, seq: int) -> float:
    """Per token."""
    inner, out = inner_bytes(shape, setup), norm_out_bytes(shape, setup)
    query, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if shape.mixer:
        query = shape.mixer.heads * shape.mixer.value_dim
    held = query if setup.repeats_kv or setup.attention == "eager" else keys
    linears = _linears(shape, of_mlp=False)
    read = _inputs_kept(shape, setup, linears=linears, width=shape.hidden, into=out)
    read += _inputs_kept(shape, setup, linears=linears, width=query, into=inner, is_attention_output=True)
    if shape.mixer:
        from sftplay.plan.mixers import mixer_kept

        return read + mixer_kept(shape, setup, inner=inner)
    read += query * inner if shape.gated_attention else 0  # the gate
    if setup.attention == "eager":
        capped = inner if shape.softcap_attn else 0  # the tanh of the scores
        probabilities = shape.heads * seq * (FP32 + (inner if inner < FP32 else 0) + capped)
        if shape.family in WITH_SINKS:
            probabilities = shape.heads * seq * inner
        return read + inner * (query + 2 * held) + probabilities
    saved = setup.compute_bytes if setup.has_autocast else inner  # autocast rounds what goes into the kernel
    # Values that are a part of one tensor with queries and keys keep all of it, while rotation makes new ones of those.
    is_fused = len(linears) == 2 and shape.family not in UNROTATED and saved == inner
    return read + saved * (2 * query + 2 * held + (query + keys if is_fused else 0)) + FP32 * shape.heads


def _mlp_kept(shape: ModelShape, setup: MemorySetup) -> float:
    """Per token."""
    linears, product = _linears(shape, of_mlp=True), _product_bytes(shape, setup)
    if shape.routed:
        from sftplay.plan.mixers import experts_kept

        routed = experts_kept(shape, setup, inner=inner_bytes(shape, setup))
        return routed + (_mlp_kept(replace(shape, routed=None), setup) if linears else 0)
    read = _inputs_kept(shape, setup, linears=linears, width=shape.hidden, into=norm_out_bytes(shape, setup))
    read += _inputs_kept(shape, setup, linears=linears, width=shape.mlp, into=product)
    return read + shape.mlp * _activation_kept(shape, setup)


def _activation_kept(shape: ModelShape, setup: MemorySetup) -> float:
    """Per token and unit of the MLP's width; gated: what goes into the activation, what comes out, and its factor."""
    inner = inner_bytes(shape, setup)
    if shape.activation not in COMPOSED:
        return inner * (3 if shape.gated_mlp else 1)
    return (2 * inner if shape.gated_mlp else 0) + 3 * _product_bytes(shape, setup) + inner


def _product_bytes(shape: ModelShape, setup: MemorySetup) -> int:
    """Bytes of a number that enters the down projection."""
    return FP32 if shape.activation in COMPOSED and setup.has_autocast else inner_bytes(shape, setup)


def _linears(shape: ModelShape, *, of_mlp: bool) -> list[Linear]:
    return [linear for linear in shape.linears if linear.is_mlp is of_mlp]


def _inputs_kept(
    shape: ModelShape, setup: MemorySetup, *, linears: list[Linear], width: int, into: int,
    is_attention_output: bool = False,
) -> float:  # fmt: skip
    """Per token: copies of one tensor of `width` that the linears reading it keep, `into` bytes an element."""

    def reads(linear: Linear) -> bool:
        # heads * head_dim, hidden and the MLP's width may be equal. The output projection is the attention's last.
        if linear.is_mlp:
            goes_out = linear.outputs == shape.hidden
            return goes_out if width == shape.mlp != shape.hidden else not goes_out
        return (linear is linears[-1]) is is_attention_output

    adapter = setup.adapter
    total, is_shared = 0.0, False
    for linear in (linear for linear in linears if linear.inputs == width and reads(linear)):
        if adapter is None:
            copied = setup.has_autocast and into != setup.compute_bytes
            total += setup.compute_bytes * width if copied else 0
            is_shared |= not copied
        elif adapter.covers(linear):
            kept = _pair_input_bytes(setup, adapter, into=into)
            # Next to the input: the narrow product, and DoRA's two wide ones.
            narrow = setup.compute_bytes if setup.has_autocast else adapter.weight_bytes
            wide = (into if not setup.has_autocast else setup.compute_bytes) + narrow
            total += kept * width + adapter.rank * narrow + (linear.outputs * wide if adapter.is_dora else 0)
            is_shared |= kept == 0
    is_new = shape.mixer or shape.gated_attention or shape.family in CONCATENATED
    is_kept_already = is_attention_output and not is_new
    return total + (into * width if is_shared and not is_kept_already else 0)


def _rounded_bytes(shape: ModelShape, setup: MemorySetup, *, of_mlp: bool) -> float:
    """Rounded copies of what trains in fp32, which autograd keeps under autocast."""
    if not setup.has_autocast or setup.trained_bytes == setup.compute_bytes:
        return 0.0
    adapter, linears = setup.adapter, _linears(shape, of_mlp=of_mlp)
    if adapter is None:
        return float(setup.compute_bytes * sum(linear.inputs * linear.outputs for linear in linears))
    widths = sum(linear.inputs + linear.outputs for linear in linears if adapter.covers(linear))
    return float(setup.compute_bytes * adapter.rank * widths)


def _mlp_transient(shape: ModelShape, setup: MemorySetup, *, tokens: int) -> float:
    """The most that the MLP adds to `kept`: when its output is made, or in that output's backward."""
    inner, out, into = inner_bytes(shape, setup), norm_out_bytes(shape, setup), _product_bytes(shape, setup)
    adapter, units = setup.adapter, shape.mlp * tokens
    # While the output is made: the stream, that output, and what the norm wrote.
    is_copied = adapter is not None and _pair_input_bytes(setup, adapter, into=out) > 0
    streams: float = shape.hidden * (stream_bytes(shape, setup) + inner + (out + inner if is_copied else 0)) * tokens
    if shape.routed:
        from sftplay.plan.mixers import experts_work

        streams += experts_work(shape, inner=inner) * tokens
    down = next((one for one in reversed(shape.linears) if one.is_mlp and one.inputs == shape.mlp), None)
    if down is None:  # a mixture of experts, which transformers does not build of linears
        return streams
    factors = 3 if shape.gated_mlp or shape.activation in COMPOSED else 2
    # A frozen projection keeps no input.
    in_forward, in_pair, released = 0.0, 0.0, float(into if setup.trains_all else 0)
    is_pair = adapter is not None and adapter.covers(down)
    if adapter is not None and is_pair:
        is_fused = any(linear.is_mlp and linear.outputs == 2 * shape.mlp for linear in shape.linears)
        in_forward, in_pair, released = _pair_moments(setup, adapter, into=into, is_fused=is_fused)
    size = down.inputs * down.outputs
    weight = _weight_moment(setup, size)
    # Unpacking starts with the scales, in fp32 before and after their offset is added (bitsandbytes, dequantize_4bit).
    scales = 2 * FP32 / NF4_BLOCK * size if setup.double_quant else 0
    unpacking = weight + scales if setup.four_bit else 0.0
    arriving = (2 if is_pair else 1) * into - released
    in_product = arriving * units + weight
    if setup.four_bit and into != setup.compute_bytes:
        # The product's own gradient before it is as wide as its input.
        in_product = max(in_product, (arriving + setup.compute_bytes) * units)
    in_factors = (factors * into - released) * units + (setup.weight_bytes * size if setup.trains_all else 0)
    is_normed_after = shape.norms_per_layer > 2 or shape.family in POST_NORMED
    in_norm = norm_moment(shape) * tokens if is_normed_after else 0.0
    return max(max(in_forward * units, unpacking) + streams, in_pair * units, in_product, in_factors, in_norm)


def _weight_moment(setup: MemorySetup, size: int) -> float:
    """Bytes made for one product with a weight: the unpacked 4-bit weight, or its gradient and that in fp32."""
    if setup.four_bit:
        return setup.compute_bytes * size
    rounded = setup.compute_bytes if setup.has_autocast and setup.weight_bytes != setup.compute_bytes else 0
    return (setup.weight_bytes + rounded) * size if setup.trains_all else 0.0


def _pair_input_bytes(setup: MemorySetup, adapter: Adapter, *, into: int) -> int:
    """Bytes of an input element that one pair keeps for itself; 0 when it shares the base's copy."""
    is_kept = _is_cast_first(setup, adapter, into=into) or (setup.has_autocast and into != setup.compute_bytes)
    kept = setup.compute_bytes if setup.has_autocast else adapter.weight_bytes
    return kept + MASK if adapter.has_dropout else kept if is_kept else 0


def _is_cast_first(setup: MemorySetup, adapter: Adapter, *, into: int) -> bool:
    """Whether PEFT turns a pair's input into the pair's dtype first; not on a 4-bit base under autocast (peft 0.21,
    `lora/bnb.py`, `requires_conversion`)."""
    return adapter.weight_bytes != into and not (setup.four_bit and setup.has_autocast)


def _pair_moments(setup: MemorySetup, adapter: Adapter, *, into: int, is_fused: bool) -> tuple[float, float, float]:
    """Bytes per token and unit of the MLP's width around a pair whose input is `into` bytes an element: its casts,
    dropout, and their way back.

    Added to what is kept where the output is made, and where it is differentiated; and of what was kept, gone when the
    output projection has been differentiated.
    """
    kept = _pair_input_bytes(setup, adapter, into=into)
    narrow = setup.compute_bytes if setup.has_autocast else adapter.weight_bytes
    is_cast = _is_cast_first(setup, adapter, into=into)
    wide = adapter.weight_bytes if is_cast else into
    # PEFT holds the cast input, and what dropout made of it, while the product rounds them to the kept copy.
    forward = (into if kept else 0) + (wide if is_cast and setup.has_autocast else 0)
    if adapter.has_dropout and wide != narrow:
        forward += wide
    # In the up projection: the base's product, the pair's and its scaled copy, when what comes after is not there yet.
    up, later = (2 * (into + 2 * narrow), 3 * into) if is_fused else (into + 2 * narrow, into)
    forward = max(forward, up - later - (kept or into))
    copy = kept - MASK if adapter.has_dropout else kept or into
    back = 2 * wide if adapter.has_dropout else max(narrow, wide if is_cast else 0) + min(into, narrow) * is_cast
    return forward, max(narrow, back - copy), kept or into


def _attention_transient(shape: ModelShape, setup: MemorySetup, *, seq: int) -> float:
    """Per token: gradients of the product's inputs and output, and what its kernel sums them up in."""
    inner = inner_bytes(shape, setup)
    if shape.mixer:
        from sftplay.plan.mixers import mixer_work

        return mixer_work(shape)
    query, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if setup.attention == "eager":
        # The softmax, its gradient, the product of both, which CUDA's kernel makes for itself (torch,
        # native/cuda/SoftMax.cu), and the scores' gradient are fp32; the rounded probabilities are gone by then.
        return inner * query + shape.heads * seq * (3 * FP32 - (inner if inner < FP32 else 0))
    held = query if setup.repeats_kv else keys
    # Sums for the queries are fp32, and each head has gradients of the keys and values that it shares
    # (torch, flash_attn/flash_api.cpp, mha_bwd).
    return inner * (2 * query + 2 * held) + FP32 * query + (2 * inner * query if held != query else 0)


CHUNK_SCORES = 2**24
"""Scores over the vocabulary that exist at a time where actions are learned from (`tasks.score.update`):
64 MiB in fp32."""

ACTION_COPIES = 5
"""fp32 copies of such a chunk: log-probabilities of model and reference, probabilities, their difference, the product;
as many in the backward pass (`tasks.score.update.score_actions`, full KL)."""

TILE_TOKENS, TILE_VOCAB = 4096, 32_768
"""Scores that exist at a time where log-probabilities are taken in tiles (trl 1.16, `kernels/chunked_logprob.py` and
`_CHUNKED_LOGPROB_CHUNK_SIZE`, which `tasks.grpo.rollouts` lowers to a smaller vocabulary)."""

FORWARD_COPIES, BACKWARD_COPIES = 3, 7
"""fp32 copies of a tile where torch folds it, instead of a kernel (ibid., `_forward_tile` and `_backward_tile`)."""

TOKEN_SUMS = 9  # fp32 numbers a token next to the tile: running maxima, sums, and what is made of them (ibid.)


def head_in_forward(shape: ModelShape, setup: MemorySetup, *, tokens: int, labelled: int) -> float:
    """Count the bytes alive when the loss has just been computed, for `tokens`, `labelled` of them with a label."""
    norm = tokens * (norm_kept(shape, setup) + norm_out_bytes(shape, setup) * shape.hidden)
    if setup.head == "score":  # one number a token, of its states in fp32
        return norm + tokens * shape.hidden * FP32
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
    if setup.head == "score":
        return norm + 2 * tokens * shape.hidden * FP32
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
