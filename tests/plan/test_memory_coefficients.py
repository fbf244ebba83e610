"""Each coefficient of the closed form against a trace, real tensors or hand arithmetic."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from oracle.cases import FAMILIES, SHALLOW_CHUNKS, TERMS, TraceSettings, case_of_term
from oracle.closed_form import closed_bytes, read_memory_setup, traced_bytes

from sftplay.config.load import load_config
from sftplay.plan import memory_setup
from sftplay.plan.forecast import Size, estimate, standing_bytes
from sftplay.plan.memory_setup import trained_params
from sftplay.plan.shape_from_config import shape_from_config

SHAPE = shape_from_config(FAMILIES["llama"], name="x")
LORA = load_config(Path(__file__).resolve().parents[2] / "configs/run_lora.yaml")

TERMS_NEARNESS = {
    # term: (phase, share within which the closed form is; a term a tenth off is further away)
    "the MLP's kept tensors": ("head", 0.01),
    "the norms' fp32 inputs": ("head", 0.005),
    "attention's kept tensors": ("head", 0.01),
    "the copy that each pair keeps of its input": ("head", 0.01),
    "what the activation keeps": ("head", 0.01),
    "the scores": ("head", 0.01),
    "the layers' inputs under checkpointing": ("head", 0.01),
    "16-bit copies of what trains in fp32": ("head", 0.003),
    "16-bit copy of the head": ("head", 0.002),
    "the layers' rounded weights": ("head", 0.003),
    "a 4-bit weight unpacked": ("layer", 0.01),
    "the MLP's working set": ("layer", 0.01),
    "a frozen MLP's working set": ("layer", 0.01),
    "the scores that the caller keeps": ("layer", 0.01),
    "eager attention's working set": ("layer", 0.015),
    "eager attention's working set in fp32": ("layer", 0.015),
}


@pytest.mark.parametrize("term", TERMS)
def test_a_step_in_which_a_term_is_large_is_near_its_trace(term):
    case, (phase, nearness) = case_of_term(term), TERMS_NEARNESS[term]
    assert closed_bytes(case)[phase] == pytest.approx(traced_bytes(case)[phase], rel=nearness)


@pytest.mark.parametrize("constant", ["NF4_BYTES", "NF4_DOUBLE_BYTES"])
def test_a_four_bit_weight_weighs_what_bitsandbytes_makes_of_it(constant):
    from bitsandbytes.functional import quantize_4bit

    is_double = constant == "NF4_DOUBLE_BYTES"
    packed, state = quantize_4bit(torch.randn(2048, 2048), quant_type="nf4", compress_statistics=is_double)
    scales = [state.absmax, *([state.state2.absmax] if is_double else [])]
    real = sum(each.numel() * each.element_size() for each in (packed, *scales)) / 2048**2
    assert getattr(memory_setup, constant) == pytest.approx(real, rel=0.001)


def test_adamw_8bit_holds_two_bytes_and_the_maxima_of_its_blocks():
    from bitsandbytes.optim import AdamW8bit

    weight = torch.nn.Parameter(torch.zeros(1024, 1024))
    weight.grad = torch.zeros_like(weight)
    optimizer = AdamW8bit([weight])
    optimizer.init_state(optimizer.param_groups[0], weight, 0, 0)
    names = ("state1", "state2", "absmax1", "absmax2")
    states = [optimizer.state[weight][name] for name in names]
    real = sum(each.numel() * each.element_size() for each in states) / weight.numel()
    assert pytest.approx(real, rel=0.005) == memory_setup.STATE_BYTES_8BIT


def test_pairs_of_an_adapter_weigh_rank_times_both_widths():
    # q and o are 1024 wide on both sides, k and v lead to 4 heads of 64, the MLP is 2816 wide.
    widths = 2 * (1024 + 1024) + 2 * (1024 + 256) + 3 * (1024 + 2816)
    code = read_memory_setup(TraceSettings(method="lora", r=8))
    assert trained_params(SHAPE, code) == 4 * 8 * widths
    assert standing_bytes(SHAPE, code).adapters == 4 * 4 * 8 * widths
    dora = replace(code, adapter=replace(code.adapter, is_dora=True))
    assert trained_params(SHAPE, dora) - trained_params(SHAPE, code) == 4 * (2 * 1024 + 2 * 256 + 2 * 2816 + 1024)
    # 50 rows of 1024 in the embedding and, as it is a weight of its own, in the head.
    rows = replace(code, adapter=replace(code.adapter, new_rows=50))
    assert trained_params(SHAPE, rows) - trained_params(SHAPE, code) == 2 * 50 * 1024
    assert trained_params(replace(SHAPE, tied=True), rows) - trained_params(SHAPE, code) == 50 * 1024


def test_rows_of_new_tokens_are_those_of_the_config(tmp_path):
    (tmp_path / "terms.txt").write_text("aileron\n\nangle of attack\n")
    listed = {"tuning.new_tokens.path": str(tmp_path / "terms.txt")}
    full = ["embed_tokens", "lm_head"]
    for values, rows in (
        ({}, 0),
        (listed, 2),
        ({**listed, "tuning.lora.modules_to_save": full}, 0),
    ):
        cfg = LORA.with_values({"train.precision": "bf16", "train.optim": "adamw_torch", **values}, "test")
        assert memory_setup.read_memory_setup(cfg).adapter.new_rows == rows


@pytest.mark.parametrize(
    ("changes", "entry_bytes"),
    [({}, 1 + 2), ({"compute_bytes": 4}, 1 + 4), ({"attention": "eager", "weight_bytes": 4}, 1 + 4)],
)
def test_a_mask_is_a_boolean_and_a_number_in_the_dtype_of_the_queries_an_entry(changes, entry_bytes):
    """As torch's convert_boolean_attn_mask makes it: 4 bytes an entry in fp32, with autocast or without."""
    code = replace(read_memory_setup(TraceSettings(method="lora", padded=True)), **changes)
    mask = estimate(SHAPE, code, size=Size(rows=3, seq=500)).phases["head"]["mask"]
    assert mask == 3 * 500 * 500 * entry_bytes


def test_what_a_loss_in_chunks_keeps_between_them_is_planned():
    assert 1 <= closed_bytes(SHALLOW_CHUNKS)["head"] / traced_bytes(SHALLOW_CHUNKS)["head"] < 1.03


@pytest.mark.parametrize("vocab", [32_000, 128_256, 151_936, 262_144, 1_000_000])
def test_a_chunk_of_the_loss_on_a_gpu_is_whole_tiles_of_a_product_and_half_a_gibibyte_of_scores_at_most(vocab):
    tokens = memory_setup.gpu_chunk_tokens(vocab)
    assert tokens % 128 == 0  # CUTLASS's usual tile is 128 rows
    assert tokens == 256 or tokens * vocab * 4 <= 2**29 < (tokens + 256) * vocab * 4 or tokens == 2048
