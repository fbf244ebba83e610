"""The traced step against a real step on the CPU, and its own consistency."""

from __future__ import annotations

import pytest
import torch

from oracle import trace
from oracle.cases import TraceSettings
from oracle.gpu_kernels import InPlaceSums
from oracle.live_bytes import LiveBytes
from oracle.trace import trace_step

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
        ("full", False, "chunked"),
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
