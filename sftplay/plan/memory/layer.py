"""Memory of a decoder layer and of its adapters, in a step."""

from __future__ import annotations

from dataclasses import dataclass

from sftplay.plan.memory.memory_setup import Adapter, MemorySetup
from sftplay.plan.shape.model_shape import Linear, ModelShape

MASK = 1  # bytes of one element of a dropout mask

FP32 = 4
NF4_BLOCK = 64  # weights to a scale (QLoRA, Dettmers 2023, section 3)

COMPOSED = ("gelu_new",)
"""Activations that transformers writes out in elementary operations; four of them keep what they read or made: the
cube's input, tanh, 1 + tanh and x / 2. Under autocast the cube and what follows are fp32 (torch, autocast's list)."""

UNROTATED = ("gpt2", "gpt_bigcode", "mpt", "bloom")  # families without rotation of queries and keys

POST_NORMED = ("olmo2", "olmo3")  # families with two norms in a layer, both behind attention and MLP

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
        kept += widths * (FP32 + (inner_bytes(shape, setup) if setup.trains_all else 0))
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
    held = query if setup.repeats_kv or setup.attention == "eager" else keys
    linears = _linears(shape, of_mlp=False)
    read = _inputs_kept(shape, setup, linears=linears, width=shape.hidden, into=out)
    read += _inputs_kept(shape, setup, linears=linears, width=query, into=inner, is_attention_output=True)
    if setup.attention == "eager":
        capped = inner if shape.softcap_attn else 0  # the tanh of the scores
        probabilities = shape.heads * seq * (FP32 + (inner if inner < FP32 else 0) + capped)
        return read + inner * (query + 2 * held) + probabilities
    saved = setup.compute_bytes if setup.has_autocast else inner  # autocast rounds what goes into the kernel
    # Values that are a part of one tensor with queries and keys keep all of it, while rotation makes new ones of those.
    is_fused = len(linears) == 2 and shape.family not in UNROTATED and saved == inner
    return read + saved * (2 * query + 2 * held + (query + keys if is_fused else 0)) + FP32 * shape.heads


def _mlp_kept(shape: ModelShape, setup: MemorySetup) -> float:
    """Per token."""
    linears, product = _linears(shape, of_mlp=True), _product_bytes(shape, setup)
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
    is_kept_already = is_attention_output and shape.family not in CONCATENATED
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
    streams = shape.hidden * (stream_bytes(shape, setup) + inner + (out + inner if is_copied else 0)) * tokens
    down = next((linear for linear in reversed(shape.linears) if linear.is_mlp), None)
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
    query, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if setup.attention == "eager":
        # The softmax, its gradient, the product of both, which CUDA's kernel makes for itself (torch,
        # native/cuda/SoftMax.cu), and the scores' gradient are fp32; the rounded probabilities are gone by then.
        return inner * query + shape.heads * seq * (3 * FP32 - (inner if inner < FP32 else 0))
    held = query if setup.repeats_kv else keys
    # Sums for the queries are fp32, and each head has gradients of the keys and values that it shares
    # (torch, flash_attn/flash_api.cpp, mha_bwd).
    return inner * (2 * query + 2 * held) + FP32 * query + (2 * inner * query if held != query else 0)
