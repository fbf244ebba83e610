"""Small configs of ten families, and closed form and trace of one step beside each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from sftplay.plan.memory.execution import Adapter, Execution
from sftplay.plan.memory.step import WORKSPACE_BYTES, Size, estimate
from sftplay.plan.shape.find import shape_from_config

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32_000,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
GEMMA = LLAMA | {"hidden_activation": "gelu_pytorch_tanh", "head_dim": 64, "tie_word_embeddings": True}
NEOX = LLAMA | {"intermediate_size": 4096, "hidden_act": "gelu", "partial_rotary_factor": 0.25}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mistral": LLAMA | {"model_type": "mistral", "intermediate_size": 3584},
    "qwen2": LLAMA | {"model_type": "qwen2", "vocab_size": 151_936, "tie_word_embeddings": True},
    "qwen3": LLAMA | {"model_type": "qwen3", "head_dim": 128},
    "gemma2": GEMMA | {"model_type": "gemma2", "final_logit_softcapping": 30.0, "sliding_window": 4096},
    "gemma3": GEMMA | {"model_type": "gemma3_text", "sliding_window": 4096, "num_hidden_layers": 6},
    "phi3": LLAMA | {"model_type": "phi3", "num_key_value_heads": 16, "pad_token_id": 0},
    "phi": NEOX | {"model_type": "phi", "num_key_value_heads": 16, "hidden_act": "gelu_new"},
    "gpt_neox": NEOX | {"model_type": "gpt_neox", "num_key_value_heads": 16},
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 1024,
        "n_head": 16,
        "n_layer": 4,
        "n_positions": 2048,
        "vocab_size": 50_257,
    },
    "olmo2": LLAMA | {"model_type": "olmo2", "pad_token_id": 0},
    "granite": LLAMA | {"model_type": "granite", "tie_word_embeddings": True},
    "smollm3": LLAMA | {"model_type": "smollm3", "pad_token_id": 0, "no_rope_layers": [1, 1, 1, 0]},
}


@dataclass(frozen=True)
class Compared:
    """Bytes of the phases by trace and by closed form; the allocator's own workspace is in neither."""

    traced: Mapping[str, float]
    closed: Mapping[str, float]

    @property
    def peak_error(self) -> float:
        """Closed form's peak over the trace's, less one."""
        return max(self.closed.values()) / max(self.traced.values()) - 1

    def errors(self, near: float = 0.95) -> dict[str, float]:
        """Of the phases that by either come within `near` of the trace's peak."""
        peak = max(self.traced.values())
        phases = [name for name in self.traced if max(self.traced[name], self.closed[name]) > near * peak]
        return {name: self.closed[name] / self.traced[name] - 1 for name in phases}


@cache
def traced_bytes(family: str, vocab: int | None, how: Any) -> dict[str, float]:
    """Peaks by trace: head (scores, loss and its backward), layer (the layers' two directions), step."""
    from oracle.trace import trace_step

    peaks = trace_step(config_of(family, vocab), how).peaks_bytes
    layer = max(peaks["backward"], peaks["forward"])
    return {"head": max(peaks["head"], peaks["loss"]), "layer": layer, "step": peaks["step"]}


def closed_bytes(family: str, vocab: int | None, how: Any, **more: Any) -> dict[str, float]:
    """The same by closed form; `more` changes the code path."""
    config = config_of(family, vocab) | ({"n_layer": how.layers, "num_hidden_layers": how.layers} if how.layers else {})
    size = Size(
        rows=how.batch,
        seq=how.seq,
        labelled=max(1, round(how.labels_share * how.batch * how.seq)),
        accumulates=how.pieces > 1,
    )
    found = estimate(shape_from_config(config, name=family), path_of(how, **more), size)
    return {phase: sum(parts.values()) - WORKSPACE_BYTES for phase, parts in found.phases.items()}


def config_of(family: str, vocab: int | None) -> dict[str, Any]:
    return FAMILIES[family] | ({"vocab_size": vocab} if vocab else {})


def path_of(how: Any, **more: Any) -> Execution:
    """The code path that a trace of these settings runs."""
    sizes = {"fp32": 4, "bf16": 2, "fp16": 2}
    weights = sizes[how.base or ("fp32" if how.method == "full" else "bf16")]
    compute = sizes[how.autocast]
    adapter = None
    if how.method != "full":
        adapter = Adapter(rank=how.r, targets=how.targets, weight_bytes=sizes[how.adapter], has_dropout=how.dropout > 0)
    fields: dict[str, Any] = {
        "weight_bytes": weights,
        "compute_bytes": compute,
        "stream_bytes": weights,
        "four_bit": how.method == "qlora",
        "double_quant": how.double_quant,
        "has_autocast": compute < 4,
        "adapter": adapter,
        "checkpointing": how.checkpointing,
        "attention": "eager" if how.attention == "eager" else "efficient" if how.padded else "flash",
        "repeats_kv": how.padded,
        "is_masked": how.padded,
        "head": "chunked" if how.head == "chunked" else "standard",
        "logits_bytes": compute,
        "is_foreach": how.optimizer == "adamw",
        "holds_scores": how.keeps_output,
    }
    return Execution(**(fields | more))


def compare(family: str, how: Any, vocab: int | None = None, **more: Any) -> Compared:
    """One step by both."""
    return Compared(traced_bytes(family, vocab, how), closed_bytes(family, vocab, how, **more))
