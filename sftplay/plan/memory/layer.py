"""Memory of a decoder layer and of its adapters, in a step."""

from __future__ import annotations

from dataclasses import dataclass

from sftplay.plan.memory.memory_setup import Adapter, MemorySetup
from sftplay.plan.shape.model_shape import Linear, ModelShape

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


FP32 = 4
NF4_BLOCK = 64
"""Weights to a scale (QLoRA, Dettmers 2023, section 3)."""

COMPOSED = ("gelu_new",)
"""Activations that transformers writes out in elementary operations, four of which keep what they read or made: the
cube's input, tanh, 1 + tanh and x / 2. Under autocast the cube and what follows are fp32 (torch, autocast's list)."""

UNROTATED = ("gpt2", "gpt_bigcode", "mpt", "bloom")
"""Families without rotation of queries and keys."""


POST_NORMED = ("olmo2", "olmo3")
"""Families with two norms in a layer, both behind attention and MLP."""

CONCATENATED = ("phi3", "phi", "gpt_neox", "stablelm")
"""Families whose rotation ends in a concatenation, so that the product's output has to be laid out anew afterwards."""


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of one layer: kept from forward to backward, and the most beside them during backward."""

    kept: float
    transient: float
    kept_without_mlp: float
    transient_attention: float

    @property
    def peak(self) -> float:
        """The most while backward runs through the layer."""
        return max(self.kept + self.transient, self.kept_without_mlp + self.transient_attention)


def layer_bytes(shape: ModelShape, execution: MemorySetup, *, tokens: int, seq: int) -> LayerBytes:
    """Bytes of one layer for a micro-batch of `tokens` in rows of `seq`."""
    mlp = _mlp_kept(shape, execution) * tokens + _fixed(shape, execution, of_mlp=True)
    rest = (_norms_kept(shape, execution) + _attention_kept(shape, execution, seq=seq)) * tokens + _fixed(
        shape, execution, of_mlp=False
    )
    return LayerBytes(
        kept=mlp + rest,
        transient=_mlp_transient(shape, execution, tokens=tokens) + _stream_gradient(shape, execution) * tokens,
        kept_without_mlp=rest,
        transient_attention=(_attention_transient(shape, execution, seq=seq) + _stream_gradient(shape, execution))
        * tokens,
    )


def stream_bytes(shape: ModelShape, execution: MemorySetup) -> int:
    """Bytes of a number in the stream: fp32 where 4-bit layers answer a layer norm's fp32 under autocast."""
    return max(execution.stream_bytes, inner_bytes(shape, execution)) if execution.four_bit else execution.stream_bytes


def norm_out_bytes(shape: ModelShape, execution: MemorySetup) -> int:
    """Bytes of a number that a norm writes: a layer norm writes fp32 under autocast, an RMS norm the stream's dtype."""
    return FP32 if shape.norm == "layer" and execution.has_autocast else execution.stream_bytes


def inner_bytes(shape: ModelShape, execution: MemorySetup) -> int:
    """Bytes of a number that a linear writes; a 4-bit one writes its input's dtype (bitsandbytes, `Linear4bit`)."""
    into = norm_out_bytes(shape, execution)
    if execution.has_autocast and not (execution.four_bit and into == FP32):
        return execution.compute_bytes
    return into


def norm_kept(shape: ModelShape, execution: MemorySetup) -> float:
    """Bytes a token that one norm over the stream keeps."""
    if shape.norm == "layer":
        # torch saves the input, which autocast has copied to fp32.
        return shape.hidden * (FP32 if execution.has_autocast else stream_bytes(shape, execution))
    trained = execution.stream_bytes if execution.trains_all else 0
    return shape.hidden * (FP32 + trained)


def _norms_kept(shape: ModelShape, execution: MemorySetup) -> float:
    per_head = 0.0
    if shape.qk_norm:
        widths = shape.heads * shape.head_dim + shape.kv_heads * shape.head_dim
        per_head = widths * (FP32 + (inner_bytes(shape, execution) if execution.trains_all else 0))
    return copies_of_stream(shape, execution) * norm_kept(shape, execution) + per_head


def norm_moment(shape: ModelShape, execution: MemorySetup) -> float:
    """Bytes a token that the backward of one norm over the stream holds beside what the norm kept."""
    # An RMS norm is written in elementary operations, five of whose fp32 gradients are alive at once.
    return shape.hidden * FP32 * (5 if shape.norm == "rms" else 2)


def copies_of_stream(shape: ModelShape, execution: MemorySetup) -> int:
    """Tensors that a layer's norms keep: norms of a parallel block read the same stream, and where it is fp32 they keep
    it itself and not a copy each."""
    return 1 if shape.parallel_block and stream_bytes(shape, execution) == FP32 else shape.norms_per_layer


def _attention_kept(shape: ModelShape, execution: MemorySetup, *, seq: int) -> float:
    inner = inner_bytes(shape, execution)
    query, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    held = query if execution.repeats_kv or execution.attention == "eager" else keys
    linears = _linears(shape, of_mlp=False)
    entering = _inputs_kept(
        shape, execution, linears=linears, width=shape.hidden, into=norm_out_bytes(shape, execution)
    )
    leaving = _inputs_kept(shape, execution, linears=linears, width=query, into=inner, is_attention_output=True)
    if execution.attention == "eager":
        capped = inner if shape.softcap_attn else 0  # the tanh of the scores
        probabilities = shape.heads * seq * (FP32 + (inner if inner < FP32 else 0) + capped)
        return entering + leaving + inner * (query + 2 * held) + probabilities
    saved = execution.compute_bytes if execution.has_autocast else inner  # autocast rounds what goes into the kernel
    # Values that are a part of one tensor with queries and keys keep all of it, while rotation makes new ones of those.
    is_fused = len(linears) == 2 and shape.family not in UNROTATED and saved == inner
    return entering + leaving + saved * (2 * query + 2 * held + (query + keys if is_fused else 0)) + FP32 * shape.heads


def _mlp_kept(shape: ModelShape, execution: MemorySetup) -> float:
    linears = _linears(shape, of_mlp=True)
    entering = _inputs_kept(
        shape, execution, linears=linears, width=shape.hidden, into=norm_out_bytes(shape, execution)
    )
    product = _inputs_kept(shape, execution, linears=linears, width=shape.mlp, into=_product_bytes(shape, execution))
    return entering + product + shape.mlp * _activation_kept(shape, execution)


def _activation_kept(shape: ModelShape, execution: MemorySetup) -> float:
    """Per token and unit of the MLP's width; gated: what goes into the activation, what comes out, and its factor."""
    inner = inner_bytes(shape, execution)
    if shape.activation not in COMPOSED:
        return inner * (3 if shape.gated_mlp else 1)
    gate = 2 * inner if shape.gated_mlp else 0
    return gate + 3 * _product_bytes(shape, execution) + inner


def _product_bytes(shape: ModelShape, execution: MemorySetup) -> int:
    """Bytes of a number that enters the down projection."""
    return FP32 if shape.activation in COMPOSED and execution.has_autocast else inner_bytes(shape, execution)


def _linears(shape: ModelShape, *, of_mlp: bool) -> list[Linear]:
    return [linear for linear in shape.linears if linear.is_mlp is of_mlp]


def _inputs_kept(
    shape: ModelShape,
    execution: MemorySetup,
    *,
    linears: list[Linear],
    width: int,
    into: int,
    is_attention_output: bool = False,
) -> float:
    """Per token: copies of one tensor of `width` that the linears reading it keep, `into` bytes an element."""
    reads = [
        linear
        for linear in linears
        if linear.inputs == width and _reads(shape, linear, width=width, is_attention_output=is_attention_output)
    ]
    adapter = execution.adapter
    total, is_shared = 0.0, False
    for linear in reads:
        if adapter is None:
            copied = execution.has_autocast and into != execution.compute_bytes
            total += execution.compute_bytes * width if copied else 0
            is_shared |= not copied
        elif adapter.covers(linear):
            own = pair_input_bytes(execution, adapter, into=into)
            total += own * width + pair_kept(execution, adapter, linear=linear, into=into)
            is_shared |= own == 0
    is_kept_already = is_attention_output and shape.family not in CONCATENATED
    return total + (into * width if is_shared and not is_kept_already else 0)


def _reads(shape: ModelShape, linear: Linear, *, width: int, is_attention_output: bool) -> bool:
    """Whether `linear` reads the tensor in question: heads * head_dim, hidden and the MLP's width may be equal."""
    if linear.is_mlp:
        return linear.outputs == shape.hidden if width == shape.mlp != shape.hidden else linear.outputs != shape.hidden
    return (linear is _output_projection(shape)) is is_attention_output


def _output_projection(shape: ModelShape) -> Linear:
    """The last of the attention's linears, as families list them."""
    return _linears(shape, of_mlp=False)[-1]


def _fixed(shape: ModelShape, execution: MemorySetup, *, of_mlp: bool) -> float:
    """Rounded copies of what trains in fp32, which autograd keeps under autocast."""
    if not execution.has_autocast or execution.trained_bytes == execution.compute_bytes:
        return 0.0
    adapter, linears = execution.adapter, _linears(shape, of_mlp=of_mlp)
    if adapter is None:
        return float(execution.compute_bytes * sum(each.inputs * each.outputs for each in linears))
    widths = sum(each.inputs + each.outputs for each in linears if adapter.covers(each))
    return float(execution.compute_bytes * adapter.rank * widths)


def _stream_gradient(shape: ModelShape, execution: MemorySetup) -> float:
    """Per token: the gradient of the stream, and its rounded copy that enters the branch."""
    inner, stream = inner_bytes(shape, execution), stream_bytes(shape, execution)
    return shape.hidden * (stream + (inner if inner != stream else 0))


def _mlp_transient(shape: ModelShape, execution: MemorySetup, *, tokens: int) -> float:
    """The most that the MLP holds beside `kept`: when its output is made, or in that output's backward."""
    down = next(linear for linear in reversed(shape.linears) if linear.is_mlp)
    into = _product_bytes(shape, execution)
    factors = 3 if shape.gated_mlp or shape.activation in COMPOSED else 2
    is_pair = execution.adapter is not None and execution.adapter.covers(down)
    is_fused = any(each.is_mlp and each.outputs == 2 * shape.mlp for each in shape.linears)
    moments = (
        pair_moments(execution, execution.adapter, into=into, is_fused=is_fused)
        if is_pair and execution.adapter
        else PairMoments(0, 0, into if execution.trains_all else 0)  # a frozen projection keeps no input
    )
    weight = _weight_moment(execution, down)
    own_gradient = execution.weight_bytes * down.inputs * down.outputs if execution.trains_all else 0
    # Unpacking starts with the scales, in fp32 before and after their offset is added (bitsandbytes, dequantize_4bit).
    scales = 2 * FP32 / NF4_BLOCK * down.inputs * down.outputs if execution.double_quant else 0
    unpacking = weight + scales if execution.four_bit else 0.0
    in_forward = max(moments.forward * shape.mlp * tokens, unpacking) + _forward_streams(shape, execution) * tokens
    in_pair = moments.pair * shape.mlp * tokens
    arriving = (2 if is_pair else 1) * into - moments.released
    in_product = arriving * shape.mlp * tokens + weight
    if (
        execution.four_bit and into != execution.compute_bytes
    ):  # the product's own gradient before it is as wide as its input
        in_product = max(in_product, (arriving + execution.compute_bytes) * shape.mlp * tokens)
    in_factors = (factors * into - moments.released) * shape.mlp * tokens + own_gradient
    is_normed_after = shape.norms_per_layer > 2 or shape.family in POST_NORMED
    in_norm = norm_moment(shape, execution) * tokens if is_normed_after else 0.0
    return max(in_forward, in_pair, in_product, in_factors, in_norm)


def _forward_streams(shape: ModelShape, execution: MemorySetup) -> float:
    """Per token, while an MLP's output is made: the stream beside it, that output, and what the norm wrote."""
    inner, out = inner_bytes(shape, execution), norm_out_bytes(shape, execution)
    is_copied = execution.adapter is not None and pair_input_bytes(execution, execution.adapter, into=out) > 0
    return shape.hidden * (stream_bytes(shape, execution) + inner + (out + inner if is_copied else 0))


def _weight_moment(execution: MemorySetup, linear: Linear) -> float:
    """Bytes made for one product with a weight: the unpacked 4-bit weight, or its gradient and that in fp32."""
    size = linear.inputs * linear.outputs
    if execution.four_bit:
        return execution.compute_bytes * size
    if execution.trains_all:
        rounded = (
            execution.compute_bytes
            if execution.has_autocast and execution.weight_bytes != execution.compute_bytes
            else 0
        )
        return (execution.weight_bytes + rounded) * size
    return 0.0


def _attention_transient(shape: ModelShape, execution: MemorySetup, *, seq: int) -> float:
    """Per token: gradients of the product's inputs and output, and what its kernel sums them up in."""
    inner = inner_bytes(shape, execution)
    query, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    held = query if execution.repeats_kv or execution.attention == "eager" else keys
    if execution.attention == "eager":
        # The softmax, its gradient, the product of both, which CUDA's kernel makes for itself (torch,
        # native/cuda/SoftMax.cu), and the scores' gradient are fp32; the rounded probabilities are gone by then.
        return inner * query + shape.heads * seq * (3 * FP32 - (inner if inner < FP32 else 0))
    # Sums for the queries are fp32, and each head has gradients of the keys and values that it shares
    # (torch, flash_attn/flash_api.cpp, mha_bwd).
    return inner * (2 * query + 2 * held) + FP32 * query + (2 * inner * query if held != query else 0)
