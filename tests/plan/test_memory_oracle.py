"""The closed form against the fake-tensor trace, which knows nothing of it: families, methods, depths, token counts."""

from __future__ import annotations

from itertools import product

import pytest
from oracle.closed_form import FAMILIES, compare
from oracle.trace import TraceSettings

TOLERANCE = 0.03
METHODS = ("full", "lora", "qlora")
DEPTHS = (2, 4)
TOKENS = (512, 1024)
FAST = ("llama", "qwen2", "qwen3", "gemma2", "phi3", "gpt_neox")
SMALL_VOCAB = 2048
"""So few scores that the layers, and not the head, decide the peak."""

VARIANTS = {
    "chunked": {"head": "chunked"},
    "chunked in two pieces": {"head": "chunked", "pieces": 2},
    "a quarter labelled": {"labels_share": 0.25},
    "two pieces": {"pieces": 2},
    "padded": {"padded": True},
    "foreach": {"optimizer": "adamw"},
    "dropout": {"dropout": 0.1},
    "16-bit adapter": {"adapter": "bf16"},
    "fp32 without autocast": {"autocast": "fp32", "base": "fp32"},
    "attention only": {"targets": ("q_proj", "k_proj", "v_proj", "o_proj")},
    "output kept": {"keeps_output": True, "fp32_output": False},
    "scales not quantised": {"double_quant": False},
}


def assert_close(found):
    assert found.peak_error == pytest.approx(0, abs=TOLERANCE)
    assert found.errors() == pytest.approx(dict.fromkeys(found.errors(), 0), abs=TOLERANCE)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAST)
def test_the_closed_form_is_within_three_percent_of_the_trace(family, method):
    for layers, tokens in product(DEPTHS, TOKENS):
        how = TraceSettings(method=method, layers=layers, batch=2, seq=tokens, checkpointing=layers == DEPTHS[0])
        assert_close(compare(family, how))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAST)
def test_it_is_so_where_a_layer_decides_the_peak(family, method):
    for checkpointing in (True, False):
        how = TraceSettings(method=method, layers=4, batch=2, seq=1024, checkpointing=checkpointing)
        assert_close(compare(family, how, SMALL_VOCAB))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", VARIANTS)
def test_it_is_so_for_every_code_path_of_the_kit(name, method):
    if method == "full" and name in ("dropout", "16-bit adapter", "attention only"):
        pytest.skip("of adapters only")
    if method == "qlora" and name == "fp32 without autocast":
        pytest.skip("bitsandbytes' layer computes in 16 bits")
    for checkpointing in (True, False):
        how = TraceSettings(method=method, layers=4, batch=2, seq=1024, checkpointing=checkpointing, **VARIANTS[name])
        assert_close(compare("llama", how))


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_so_for_more_families_depths_and_heads(family, method):
    for layers, tokens, checkpointing, head in product((2, 4), (512, 1024), (True, False), ("standard", "chunked")):
        # Gemma 3 repeats its layers in sixes.
        depth = 3 * layers if family == "gemma3" else layers
        how = TraceSettings(method=method, layers=depth, batch=2, seq=tokens, checkpointing=checkpointing, head=head)
        assert_close(compare(family, how))
