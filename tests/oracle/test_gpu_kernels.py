"""The stand-ins for CUDA kernels against torch's own descriptions of them and against bitsandbytes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from oracle.gpu_kernels import (
    AUTOCAST_TO_FP32,
    InPlaceSums,
    KernelTemporaries,
    attend,
    four_bit_class,
    make_scales,
)
from oracle.live_bytes import LiveBytes


def tensor_bytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def test_what_autocast_makes_fp32_stands_in_torchs_own_list():
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    if not header.exists():
        pytest.skip("this torch comes without its headers")
    text = header.read_text()
    lists = re.findall(r"#define AT_FORALL_FP32(?:_SET_OPT_DTYPE)?\(_\)(.*?)\n\n", text, re.S)
    assert len(lists) == 2
    assert set(re.findall(r"_\((\w+)", " ".join(lists))) >= AUTOCAST_TO_FP32


def test_flash_attention_keeps_what_torch_says_it_returns():
    rows, heads, keys, tokens, width = 2, 8, 2, 100, 64

    def make(n: int, device: str) -> torch.Tensor:
        return torch.zeros(rows, tokens, n, width, dtype=torch.bfloat16, device=device).transpose(1, 2)

    out, log_sum, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*[make(heads, "meta")] * 3, 0.0, True)
    q, k, v = (make(n, "cpu").requires_grad_() for n in (heads, keys, keys))
    with LiveBytes() as live:
        result = attend(q, k, v, is_causal=True, enable_gqa=True)
        assert live.live_bytes == tensor_bytes(out, log_sum)
    assert (result.shape, result.stride()) == (out.shape, out.stride())


def test_flash_attentions_backward_takes_fp32_sums_and_a_gradient_per_head():
    rows, heads, keys, tokens, width = 1, 8, 2, 128, 64
    q, k, v = (
        torch.zeros(rows, n, tokens, width, dtype=torch.bfloat16, requires_grad=True) for n in (heads, keys, keys)
    )
    with LiveBytes() as live:
        out = attend(q, k, v)
        grad = torch.zeros_like(out)
        resting = live.live_bytes
        live.forget_peaks()
        out.backward(grad)
    per_query, per_key = rows * heads * tokens * width, rows * keys * tokens * width
    grads = 2 * (per_query + 2 * per_key)
    inside = 4 * per_query + 4 * rows * heads * tokens + 2 * 2 * per_query
    assert live.peaks_bytes["load"] == resting + grads + inside
    assert live.live_bytes == resting + grads - 4 * rows * heads * tokens  # what was kept is gone


@pytest.mark.parametrize("double_quant", [True, False])
def test_a_four_bit_layer_weighs_what_bitsandbytes_layer_weighs(double_quant):
    from bitsandbytes.functional import quantize_4bit

    inputs, outputs = 192, 320
    packed, state = quantize_4bit(torch.randn(outputs, inputs), quant_type="nf4", compress_statistics=double_quant)
    real = [packed, state.absmax, state.code]
    if double_quant:
        real += [state.state2.absmax, state.state2.code, state.offset]
    layer = four_bit_class()(inputs, outputs, None, double_quant)
    assert tensor_bytes(*layer.parameters(), *layer.buffers()) == tensor_bytes(*real)
    assert tensor_bytes(*make_scales(inputs * outputs, double_quant)) == tensor_bytes(*real[1:])


def test_a_four_bit_layer_keeps_nothing_for_backward_and_unpacks_its_weight_twice():
    inputs, outputs, tokens = 128, 256, 64
    layer = four_bit_class()(inputs, outputs, None, True)
    x = torch.zeros(tokens, inputs, dtype=torch.bfloat16, requires_grad=True)
    unpacked, out_bytes = 2 * inputs * outputs, 2 * tokens * outputs
    with LiveBytes() as live:
        out = layer(x)
        assert live.live_bytes == out_bytes
        assert live.peaks_bytes["load"] == unpacked + out_bytes + 2 * 4 * inputs * outputs // 64
        grad = torch.zeros_like(out)
        live.forget_peaks()
        out.backward(grad)
    assert live.peaks_bytes["load"] == unpacked + 2 * out_bytes + 2 * tokens * inputs


class Known(torch.autograd.Function):
    """Passes its input on and hands `grad` to what comes before; `keeps` says whether someone else holds it too."""

    @staticmethod
    def forward(ctx, x, made, keeps):
        ctx.made, ctx.keeps = made, keeps
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        grad = torch.ones(1000)
        ctx.made.append((grad.data_ptr(), grad if ctx.keeps else None))
        return grad, None, None


def sums_into(keeps: bool) -> bool:
    """Whether the sum of two gradients lies where the first lay."""
    made: list = []
    found: list[int] = []
    x = torch.zeros(1000, requires_grad=True)
    y = x.clone()
    y.register_hook(lambda grad: found.append(grad.data_ptr()))
    (Known.apply(y, made, keeps) + Known.apply(y, made, keeps)).sum().backward()
    return found[0] == made[0][0]


@pytest.mark.parametrize("keeps", [False, True])
def test_gradients_are_summed_in_place_just_where_torch_does_so_when_nothing_watches(keeps):
    really = sums_into(keeps)
    assert really is not keeps
    with LiveBytes():
        assert sums_into(keeps) is False  # a mode alone changes what torch does
    with LiveBytes(), InPlaceSums():
        assert sums_into(keeps) is really


@pytest.mark.parametrize(("function", "temporaries"), [(torch.softmax, 1), (torch.log_softmax, 0)])
def test_a_softmaxs_backward_holds_its_gradient_times_its_output_beside_them(function, temporaries):
    scores = torch.zeros(8, 64, requires_grad=True)
    with LiveBytes() as live, KernelTemporaries():
        out = function(scores, -1)
        grad = torch.zeros_like(out)
        resting = live.live_bytes
        live.forget_peaks()
        out.backward(grad)
    # Beside output and gradient: the gradient of the scores, and what the kernel makes for itself.
    assert live.peaks_bytes["load"] - resting == (1 + temporaries) * tensor_bytes(scores)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_softmaxs_backward_on_the_gpu_holds_as_much():
    scores = torch.zeros(1024, 1024, device="cuda", requires_grad=True)
    out = torch.softmax(scores, -1)
    grad = torch.zeros_like(out)
    resting = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out.backward(grad)
    assert torch.cuda.max_memory_allocated() - resting == 2 * tensor_bytes(scores)
