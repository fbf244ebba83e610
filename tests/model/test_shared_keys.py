"""Keys that heads share are repeated where torch has no fused kernel for them, and nowhere else.

The table is torch's: flash attention and cuDNN's kernel take shared keys, in 16 bits and from capability 8.0 on; the
memory-efficient one never does (torch 2.13, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp). What runs without a
kernel writes out the scores; transformers' issue 48633 has it measured on a T4.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.integrations import sdpa_attention

from sftplay.config.load import load_config
from sftplay.model import weights
from sftplay.model.weights import open_model

V100, T4, A100, L4, H100 = (7, 0), (7, 5), (8, 0), (8, 9), (9, 0)
HEADS, SHARED = 8, 2


@pytest.fixture(autouse=True)
def opened_once(write_config: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process that has opened a model; transformers is as it was afterwards."""
    stock = sdpa_attention.use_gqa_in_sdpa
    cfg = load_config(write_config(tuning__mode="full", model__attn="sdpa"))
    for _ in range(2):  # a second model must not change what the first one did
        open_model(cfg, str(cfg.model.name), dtype=torch.float32)
    yield
    sdpa_attention.use_gqa_in_sdpa = stock


def stay_shared(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype, autocast: torch.dtype | None
) -> bool:
    """Whether transformers hands keys to torch as they are, without a mask, on a GPU of `capability`."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    if autocast:  # torch.autocast itself asks for a GPU
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda")
        monkeypatch.setattr(torch, "get_autocast_dtype", lambda _: autocast)
    key = SimpleNamespace(shape=(1, SHARED, 16, 8), dtype=dtype, device=torch.device("cuda", 0))
    return sdpa_attention.use_gqa_in_sdpa(None, key, key)


@pytest.mark.parametrize(
    ("capability", "dtype", "autocast", "stays"),
    [
        (V100, torch.float16, None, False), (T4, torch.float16, None, False),
        (V100, torch.float32, torch.float16, False), (A100, torch.float32, None, False),
        (A100, torch.bfloat16, None, True), (L4, torch.float16, None, True),
        (H100, torch.float32, torch.bfloat16, True),
    ],
)  # fmt: skip
def test_keys_stay_shared_where_flash_attention_takes_them_and_are_repeated_elsewhere(
    capability: tuple[int, int], dtype: torch.dtype, autocast: Any, stays: bool, monkeypatch: pytest.MonkeyPatch
):
    assert stay_shared(monkeypatch, capability, dtype, autocast) == stays


def test_a_model_with_repeated_keys_gives_torch_as_many_as_queries_and_the_same_answer(monkeypatch: pytest.MonkeyPatch):
    layer = SimpleNamespace(num_key_value_groups=HEADS // SHARED, is_causal=True)
    query, key, value = (torch.randn(1, heads, 16, 8) for heads in (HEADS, SHARED, SHARED))
    shared, _ = sdpa_attention.sdpa_attention_forward(layer, query, key, value, None)
    seen, real = [], torch.nn.functional.scaled_dot_product_attention

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **named: Any) -> torch.Tensor:
        seen.append((k.shape[1], v.shape[1], named.get("enable_gqa", False)))
        return real(q, k, v, **named)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    monkeypatch.setattr(weights, "_has_grouped_kernel", lambda _: False)
    repeated, _ = sdpa_attention.sdpa_attention_forward(layer, query, key, value, None)
    assert seen == [(HEADS, HEADS, False)]
    assert torch.allclose(repeated, shared, atol=1e-6)
