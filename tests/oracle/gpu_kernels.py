"""Makes a step on CPU tensors hold in memory what the same step holds on a CUDA GPU.

A CPU build of torch picks other kernels: attention that builds the scores, dropout with a mask of floats, other
operators in autocast's fp32 list, no 4-bit matrix products. The stand-ins here allocate, save and free what the GPU's
kernels do; their numbers mean nothing, so that they serve fake tensors only.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

AUTOCAST_TO_FP32 = frozenset(
    """acos asin cosh erfinv exp expm1 log log10 log1p log2 logsumexp reciprocal rsqrt sinh tan pow softplus layer_norm
    rms_norm group_norm nll_loss softmax log_softmax""".split()  # noqa: SIM905
)
"""Operators whose 16-bit arguments autocast on CUDA turns into fp32: torch's ATen/autocast_mode.h, AT_FORALL_FP32 and
the softmaxes of AT_FORALL_FP32_SET_OPT_DTYPE, as far as decoders use them. Autocast on a CPU has few of these."""

OTHER_SPELLINGS = {"__pow__": "pow", "__rpow__": "pow", "cross_entropy": "log_softmax"}

FLASH_ROWS, FLASH_COLUMNS = 128, 32
"""Flash attention's backward rounds its fp32 buffers up to these (torch, flash_attn/flash_api.cpp, mha_bwd)."""

NF4_BLOCK, SCALE_BLOCK, NF4_CODES, SCALE_CODES = 64, 256, 16, 256
"""bitsandbytes: weights to a scale, scales to a second scale, and the entries of both code books."""


class CudaKernels(TorchFunctionMode):
    """While in force, attention, dropout and autocast behave in memory as on CUDA.

    `host_reads` answers where code reads a tensor as a Python integer, which a fake tensor cannot.
    """

    def __init__(self, host_reads: int) -> None:
        super().__init__()
        self.host_reads = host_reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention":
            return attend(*args, **kwargs)
        if name == "dropout" and func is nn.functional.dropout:
            return _drop(*args, **kwargs)
        if name in ("__index__", "__int__"):
            return self.host_reads
        if OTHER_SPELLINGS.get(name, name) in AUTOCAST_TO_FP32 and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map(_to_fp32, (args, kwargs))
        return func(*args, **kwargs)


class InPlaceSums(TorchDispatchMode):
    """While in force, autograd's engine adds a second gradient into the first, as it does without any mode.

    The engine does so where it alone holds the first (torch, autograd/input_buffer.cpp, can_accumulate_inplace), but
    never while a mode watches it or on a tensor's subclass such as a fake one; then a sum is a new tensor.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.add.Tensor and not kwargs and _is_engine_summing(args):
            func = torch.ops.aten.add_.Tensor
        return func(*args, **(kwargs or {}))


class KernelTemporaries(TorchDispatchMode):
    """While in force, the softmax's backward holds what its CUDA kernel makes for itself: gradient times output, as
    large as either (torch, native/cuda/SoftMax.cu, softmax_backward_cuda_out). A log-softmax's makes none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _product = args[0] * args[1] if func is torch.ops.aten._softmax_backward_data.default else None
        return func(*args, **(kwargs or {}))


HELD_BY_THE_CALL = (4, 2, 3)
"""References to a tensor, to its storage and to its Python object that come from the call alone (torch 2.13)."""


def _is_engine_summing(args: tuple[Any, ...]) -> bool:
    if torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
        return False
    if not isinstance(args[1], Tensor) or (args[0].shape, args[0].dtype) != (args[1].shape, args[1].dtype):
        return False
    storage = torch._C._storage_Use_Count(args[0].untyped_storage()._cdata)
    held = (args[0]._use_count(), storage, sys.getrefcount(args[0]))
    return all(count <= own for count, own in zip(held, HELD_BY_THE_CALL, strict=True))


def _to_fp32(value: Any) -> Any:
    is_half = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if is_half else value


def _drop(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    # The GPU's kernel keeps one byte an element.
    return torch.native_dropout(x, p, True)[0] if training and p > 0 else x


def attend(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **more: Any) -> Tensor:
    """The output [rows, heads, tokens, head width] of `scaled_dot_product_attention` on CUDA.

    Without a mask flash attention runs; with one the memory-efficient kernel, which torch gives the mask as numbers in
    the query's dtype, made anew in every layer and kept for backward.
    """
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    bias = None
    if attn_mask is not None:
        bias = torch.empty(attn_mask.shape, dtype=query.dtype) if attn_mask.dtype == torch.bool else attn_mask
    return FusedAttention.apply(query, key, value, bias)


class FusedAttention(torch.autograd.Function):
    """Keeps q, k, v, the output and one fp32 number a head and token, never the scores."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        query, key, value, bias = given
        rows, heads, tokens, _ = query.shape
        out = torch.empty_like(query)  # laid out as the query is
        log_sum = query.new_empty(rows, heads, tokens, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, bias, out, log_sum)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        query, key, value, _bias, _out, log_sum = ctx.saved_tensors
        rows, heads, tokens, width = query.shape
        padded = -(-tokens // FLASH_ROWS) * FLASH_ROWS
        columns = -(-width // FLASH_COLUMNS) * FLASH_COLUMNS
        grad_query, grad_key, grad_value = (torch.empty_like(x) for x in (query, key, value))
        _row_sums = torch.empty_like(log_sum)
        _sums = query.new_empty(rows, heads, padded, columns, dtype=torch.float32)
        if key.shape[1] != heads:  # summed over the heads that share a key afterwards
            _per_head = [key.new_empty(rows, key.shape[2], heads, width) for _ in range(2)]
        return grad_query, grad_key, grad_value, None


class FourBitMatmul(torch.autograd.Function):
    """bitsandbytes' MatMul4Bit: unpacks the weight for the product, and once more for the input's gradient.

    Nothing is kept for backward but the packed weight (bitsandbytes 0.50, autograd/_functions.py). Above 1536 tokens
    the forward always unpacks the whole weight, below on most GPUs (backends/cuda/ops.py).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Any) -> Tensor:
        ctx.layer = layer
        _scales = [layer.unpack_scales() for _ in range(2)]  # before and after their offset is added
        return nn.functional.linear(x, layer.unpack(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        return torch.matmul(grad, ctx.layer.unpack(grad.dtype)), None


def four_bit_class() -> type:
    """The stand-in for bitsandbytes' Linear4bit, a subclass of it, so that PEFT treats it alike."""
    from bitsandbytes.nn import Linear4bit

    class FourBitLinear(Linear4bit):
        """A linear layer [inputs, outputs] that holds packed codes and scales; its bias stays as it is."""

        def __init__(self, inputs: int, outputs: int, bias: nn.Parameter | None, double_quant: bool) -> None:
            nn.Module.__init__(self)
            self.in_features, self.out_features, self.bias = inputs, outputs, bias
            packed = torch.empty((inputs * outputs + 1) // 2, 1, dtype=torch.uint8)
            self.weight = nn.Parameter(packed, requires_grad=False)
            self.weight.compress_statistics, self.weight.quant_type = double_quant, "nf4"
            self.compute_dtype, self.compute_type_is_set, self.quant_state = torch.bfloat16, True, None
            self.double_quant = double_quant
            for i, scale in enumerate(make_scales(inputs * outputs, double_quant)):
                self.register_buffer(f"scale_{i}", scale, persistent=False)

        def unpack_scales(self) -> Tensor | None:
            """The scales as fp32, where they are quantised themselves."""
            return torch.empty(-(-self.in_features * self.out_features // NF4_BLOCK)) if self.double_quant else None

        def unpack(self, dtype: torch.dtype) -> Tensor:
            """The whole weight, `dtype` [outputs, inputs]."""
            return torch.empty(self.out_features, self.in_features, dtype=dtype)

        def forward(self, x: Tensor) -> Tensor:
            out = FourBitMatmul.apply(x.to(self.compute_dtype), self)
            out = out if self.bias is None else out.add_(self.bias.to(self.compute_dtype))
            return out.to(x.dtype)

    return FourBitLinear


def make_scales(weights: int, double_quant: bool) -> Sequence[Tensor]:
    """What bitsandbytes keeps beside the codes of a matrix: scales and code books.

    One fp32 a 64 weights; with double quantisation one byte, and one fp32 a 256 of those bytes, their code book and
    offset (bitsandbytes 0.50, functional.py, quantize_4bit).
    """
    blocks = -(-weights // NF4_BLOCK)
    codes = torch.empty(NF4_CODES)
    if not double_quant:
        return codes, torch.empty(blocks)
    second = torch.empty(-(-blocks // SCALE_BLOCK))
    return codes, torch.empty(blocks, dtype=torch.uint8), second, torch.empty(SCALE_CODES), torch.empty(())


@contextmanager
def replaced(owner: Any, name: str, stand_in: Any) -> Iterator[None]:
    """`owner.name` is `stand_in` inside."""
    kept = getattr(owner, name)
    setattr(owner, name, stand_in)
    try:
        yield
    finally:
        setattr(owner, name, kept)
