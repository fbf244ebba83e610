"""The traced step against a real step on the CPU, and its own consistency."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from oracle import trace
from oracle.cases import TraceSettings, attention_of
from oracle.gpu_kernels import InPlaceSums
from oracle.live_bytes import LiveBytes
from oracle.trace import CHUNK, trace_step

LLAMA = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 500, "n_positions": 256}
GEMMA3 = LLAMA | {
    "model_type": "gemma3_text",
    "head_dim": 32,
    "num_hidden_layers": 9,
    "layer_types": 3 * ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mistral": LLAMA | {"model_type": "mistral"},
    "qwen2": LLAMA | {"model_type": "qwen2"},
    "qwen3": LLAMA | {"model_type": "qwen3", "head_dim": 32},
    "gemma2": LLAMA | {"model_type": "gemma2", "head_dim": 32},
    "gemma3": {"model_type": "gemma3", "text_config": GEMMA3},
    "phi": LLAMA | {"model_type": "phi", "num_key_value_heads": 4},
    "phi3": LLAMA | {"model_type": "phi3", "pad_token_id": 0, "original_max_position_embeddings": 512},
    "gpt_neox": LLAMA | {"model_type": "gpt_neox"},
    "gpt2": GPT2,
    "smollm3": LLAMA | {"model_type": "smollm3", "pad_token_id": 0, "no_rope_layers": [1, 1]},
    "falcon": {"model_type": "falcon", "hidden_size": 128, "num_attention_heads": 4, "vocab_size": 1000},
}
SMALL = {"batch": 2, "seq": 128}

pytestmark = pytest.mark.slow  # fast tests use recorded traces


def run_really(how: TraceSettings) -> dict[str, int]:
    """Peaks of the phases of a real step on the CPU, written down without the trace's code."""
    from accelerate.utils import convert_outputs_to_fp32
    from transformers import LlamaConfig, LlamaForCausalLM

    from sftplay.config.run import LoraConfig
    from sftplay.model.adapter import add_adapter
    from sftplay.train.loss_heads import LabelHead, put_chunked_head

    config = LlamaConfig(**{k: v for k, v in LLAMA.items() if k != "model_type"}, attn_implementation="eager")
    ids = torch.arange(how.batch * how.seq).reshape(how.batch, how.seq) % 1000
    labels = torch.where(torch.arange(how.seq) % 2 == 0, -100, ids)
    with LiveBytes() as live, InPlaceSums():
        base = LlamaForCausalLM(config).to(torch.float32 if how.method == "full" else torch.bfloat16)
        model = base if how.method == "full" else add_adapter(base, LoraConfig(r=how.r))
        if how.checkpointing:
            trace.recompute(base, {"use_reentrant": False})
        batch = {"input_ids": ids, "labels": labels, "use_cache": False}
        if how.head == "chunked":
            put_chunked_head(base, proves=False)
        else:
            batch["shift_labels"] = LabelHead(base).narrow(labels)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, fused=True)
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        live.forget_peaks()
        live.enter_phase("compute")
        forward = convert_outputs_to_fp32(torch.autocast("cpu", torch.bfloat16)(model.forward))
        forward(**batch, num_items_in_batch=torch.tensor(float(ids.numel())))["loss"].backward()
        live.enter_phase("step")
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
    return live.peaks_bytes


@pytest.mark.parametrize(
    ("method", "checkpointing", "head"),
    [
        ("lora", True, "standard"),
        ("lora", False, "standard"),
        ("full", True, "standard"),
        ("full", False, "chunked"),
        ("lora", True, "chunked"),
    ],
)
def test_a_traced_step_holds_what_a_real_one_holds(method, checkpointing, head):
    # Eager attention is the one that a CPU computes as a GPU does.
    how = TraceSettings(
        method=method, checkpointing=checkpointing, head=head, r=8, labels_share=0.5, attention="eager", **SMALL
    )
    really, traced = run_really(how), trace_step(LLAMA, how).peaks_bytes
    computing = max(traced[phase] for phase in ("forward", "head", "loss", "backward"))
    assert computing == pytest.approx(really["compute"], rel=0.005)
    assert traced["step"] == pytest.approx(really["step"], rel=0.005)


@pytest.mark.parametrize("method", ["full", "qlora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_traced(family, method):
    config = FAMILIES[family]
    how = TraceSettings(method=method, layers=2, attention=attention_of(family), **SMALL)
    kept, whole = (trace_step(config, replace(how, checkpointing=c)) for c in (True, False))
    assert set(kept.peaks_bytes) == {"load", "forward", "head", "loss", "backward", "step"}
    assert kept.peaks_bytes["forward"] < whole.peaks_bytes["forward"]
    assert kept.peaks_bytes["load"] >= sum(kept.static_bytes.values())


def test_adamw_by_foreach_takes_a_copy_of_what_trains():
    # Published: full bf16 Mistral-7B by foreach took 5.0 times its weights (the spec, section 3).
    fused, foreach = (
        trace_step(LLAMA, TraceSettings(method="full", optimizer=name, base="bf16", autocast="fp32", **SMALL))
        for name in ("adamw_fused", "adamw")
    )
    weights = sum(fused.static_bytes.values())
    assert fused.peaks_bytes["step"] == pytest.approx(4 * weights, rel=0.02)
    assert foreach.peaks_bytes["step"] == pytest.approx(5 * weights, rel=0.02)


def test_scores_cost_twelve_bytes_an_entry_and_are_computed_where_a_label_waits():
    # fp32: the log-softmax kept for backward, its gradient and the scores' gradient.
    half, whole = (
        trace_step(LLAMA | {"vocab_size": 50_000}, TraceSettings(method="lora", labels_share=share, **SMALL))
        for share in (0.5, 1.0)
    )
    entries = 128 * 50_000
    assert whole.peaks_bytes["loss"] - half.peaks_bytes["loss"] == pytest.approx(12 * entries, rel=0.01)


def test_the_chunked_head_does_not_grow_with_the_scores():
    few, many = (
        trace_step(LLAMA | {"vocab_size": 50_000}, TraceSettings(method="lora", head="chunked", seq=n * CHUNK))
        for n in (1, 4)
    )
    assert many.peaks_bytes["loss"] - few.peaks_bytes["loss"] < 4 * CHUNK * 50_000


def test_a_trace_is_repeatable_and_leaves_torch_as_it_was():
    ask = torch.is_autocast_enabled
    how = TraceSettings(method="lora", dropout=0.1, **SMALL)
    first, second = trace_step(LLAMA, how), trace_step(LLAMA, how)
    assert first.peaks_bytes == second.peaks_bytes
    assert torch.is_autocast_enabled is ask
    assert type(torch.zeros(1)) is torch.Tensor


def test_padded_rows_need_a_mask_and_keys_repeated_for_every_head():
    whole, padded = (
        trace_step(LLAMA, TraceSettings(method="lora", checkpointing=False, padded=p, **SMALL)) for p in (False, True)
    )
    rows, seq = 2, 128
    kept = sum(b.bytes for b in padded.kept) - sum(b.bytes for b in whole.kept)
    # In each of two layers: the mask in bf16, and k and v of 4 heads of width 32 in place of 2.
    assert kept == 2 * (2 * rows * seq * seq + 2 * 2 * rows * seq * 2 * 32)


def test_a_loop_that_keeps_the_output_holds_the_scores_while_they_are_differentiated():
    config = LLAMA | {"vocab_size": 50_000}
    dropped, half, whole = (
        trace_step(config, TraceSettings(method="lora", keeps_output=k, fp32_output=f, **SMALL)).peaks_bytes["loss"]
        for k, f in ((False, True), (True, False), (True, True))
    )
    entries = 2 * 128 * 50_000
    assert half - dropped == pytest.approx(2 * entries, rel=0.01)
    assert whole - dropped == pytest.approx(4 * entries, rel=0.01)
