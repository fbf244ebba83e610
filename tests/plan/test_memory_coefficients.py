"""Each coefficient of the closed form against a trace, real tensors or hand arithmetic."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from oracle.cases import FAMILIES, SHALLOW_CHUNKS, TERMS, TraceSettings, case_of_term
from oracle.closed_form import closed_bytes, read_memory_setup, traced_bytes

from sftplay.config.load import load_config
from sftplay.machine.probe import Gpu, Machine
from sftplay.plan import memory, memory_setup
from sftplay.plan.find_shape import find_shape
from sftplay.plan.forecast import Device, runtime_bytes
from sftplay.plan.memory import Size, estimate, find_share, standing_bytes
from sftplay.plan.memory_setup import MemorySetup, trained_params
from sftplay.plan.shape_from_config import shape_from_config
from sftplay.plan.sizing import size_run

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


def test_what_a_loss_in_chunks_keeps_between_them_is_planned():
    assert 1 <= closed_bytes(SHALLOW_CHUNKS)["head"] / traced_bytes(SHALLOW_CHUNKS)["head"] < 1.03


@pytest.mark.parametrize("constant", ["NF4_BYTES", "NF4_DOUBLE_BYTES"])
def test_a_four_bit_weight_weighs_what_bitsandbytes_makes_of_it(constant):
    from bitsandbytes.functional import quantize_4bit

    is_double = constant == "NF4_DOUBLE_BYTES"
    packed, state = quantize_4bit(torch.randn(2048, 2048), quant_type="nf4", compress_statistics=is_double)
    scales = [state.absmax, *([state.state2.absmax] if is_double else [])]
    real = sum(each.numel() * each.element_size() for each in (packed, *scales)) / 2048**2
    assert getattr(memory_setup, constant) == pytest.approx(real, rel=0.001)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adamw_holds_two_states_of_the_weights_own_size(dtype):
    weight = torch.nn.Parameter(torch.zeros(1000, 1000, dtype=dtype))
    weight.grad = torch.zeros_like(weight)
    optimizer = torch.optim.AdamW([weight])
    optimizer.step()
    states = [each for each in optimizer.state[weight].values() if each.numel() > 1]
    real = sum(each.numel() * each.element_size() for each in states) / weight.numel()
    code = MemorySetup(weight_bytes=dtype.itemsize, compute_bytes=2, stream_bytes=2)
    assert code.state_bytes == pytest.approx(real, rel=0.001)


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


def test_chunks_are_counted_as_long_as_they_are():
    from sftplay.train import loss_heads as chunked_head

    code = read_memory_setup(TraceSettings(method="lora"))
    assert code.chunk_tokens == chunked_head.CHUNK_TOKENS
    # 2^27 scores: 4.1 times 256 tokens of 128,256 words, 2.0 times of Gemma's 262,208.
    vocabularies = (32_000, 128_256, 262_208, 2**20)
    assert [memory_setup.gpu_chunk_tokens(vocab) for vocab in vocabularies] == [2048, 1024, 256, 256]


@pytest.mark.parametrize(("capability", "mib"), [((8, 0), 16.25), ((9, 0), 64)])
def test_a_plan_counts_the_workspace_of_its_card(capability: tuple[int, int], mib: float):
    cfg = LORA.with_values({"model.name": "Qwen/Qwen2.5-1.5B"}, "test")
    card = Gpu(0, "a card", 80 * 2**30, 80 * 2**30, capability)
    machine = Machine((card,), "none", 2**36, 8, "3.11", "Linux", {"torch": "2.13.0"})
    seen = size_run(cfg, machine, shape=find_shape("Qwen/Qwen2.5-1.5B")).forecast
    assert seen is not None
    assert seen.components["workspace"] == mib * 2**20


def test_a_context_is_that_of_the_card_and_not_of_the_first_with_its_major_number():
    """A V100's is 0.3 to 0.4 GiB (pytorch issue 20532, p3.8xlarge), a T4's 0.14 (fitcheck's public table)."""

    def context(capability: tuple[int, int]) -> float:
        return runtime_bytes(Device("a card", 0, 0, True, capability), 1) / 2**30

    assert 0.3 <= context((7, 0)) <= 0.4
    assert context((7, 5)) == pytest.approx(0.14)
    assert context((6, 1)) == context((7, 0))
    assert context((8, 9)) == context((8, 0)) < context((9, 0)) == context((12, 0))


@pytest.mark.parametrize(
    ("changes", "entry_bytes"),
    [({}, 1 + 2), ({"compute_bytes": 4}, 1 + 4), ({"attention": "eager", "weight_bytes": 4}, 1 + 4)],
)
def test_a_mask_is_a_boolean_and_a_number_in_the_dtype_of_the_queries_an_entry(changes, entry_bytes):
    """As torch's convert_boolean_attn_mask makes it: 4 bytes an entry in fp32, with autocast or without."""
    code = replace(read_memory_setup(TraceSettings(method="lora", padded=True)), **changes)
    mask = estimate(SHAPE, code, size=Size(rows=3, seq=500)).phases["head"]["mask"]
    assert mask == 3 * 500 * 500 * entry_bytes


def test_foreach_holds_one_more_copy_of_what_trains():
    code = MemorySetup(weight_bytes=2, compute_bytes=2, stream_bytes=2, is_foreach=True)
    step = estimate(SHAPE, code, size=Size(rows=1, seq=8)).phases["step"]
    standing = sum(step[name] for name in ("weights", "gradients", "optimizer", "optimizer step"))
    # Published: full bf16 Mistral-7B took 67.46 GiB = 5.0 times its weights of 13.49 (fms-acceleration's table).
    assert standing / (2 * SHAPE.total_params) == pytest.approx(67.46 / 13.49, rel=0.002)


def test_ddp_holds_a_copy_of_the_gradients_in_its_buckets():
    code = read_memory_setup(TraceSettings(method="full"))
    standing = standing_bytes(SHAPE, code)
    share = find_share(SHAPE, code, standing=standing, strategy="ddp", world_size=2)
    assert share.communication.buffers == 4 * SHAPE.total_params


def test_deepspeeds_buckets_hold_five_hundred_million_elements():
    wide = replace(SHAPE, layers=200)
    code = MemorySetup(weight_bytes=4, compute_bytes=2, stream_bytes=4, has_autocast=True)
    share = find_share(wide, code, standing=standing_bytes(wide, code), strategy="zero1", world_size=2)
    assert share.communication.buffers == 2 * 2 * 500_000_000
    assert memory.BUCKET_ELEMENTS == 500_000_000
