"""A step of every family that transformers opens has one loss and one gradient, however many rows a micro-batch has."""

from __future__ import annotations

from pathlib import Path
from shutil import copy
from typing import Any

import pytest
import torch
from in_process import Inputs, train
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from sftplay.errors import ConfigError
from sftplay.plan.more_families import ENCODERS, missing_attention

WORDS, LARGEST = 400, 90_000_000
SIZES: dict[str, Any] = {
    **dict.fromkeys(["hidden_size", "d_model", "n_embd", "dim", "embedding_size", "attention_hidden_size"], 64),
    **dict.fromkeys(["intermediate_size", "ffn_dim", "n_inner", "d_ff", "decoder_ffn_dim", "ffn_hidden_size"], 128),
    **dict.fromkeys(["intermediate_size_mlp", "moe_shared_expert_intermediate_size"], 64),
    **dict.fromkeys(["num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers"], 2),
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "decoder_attention_heads"], 4),
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"], 4),
    **dict.fromkeys(["num_key_value_heads", "num_experts_per_tok", "moe_k", "linear_num_key_heads"], 2),
    **dict.fromkeys(["head_dim", "v_head_dim", "q_lora_rank", "kv_lora_rank", "mamba_d_state", "state_size"], 16),
    **dict.fromkeys(["index_head_dim", "mamba_d_head", "mamba_head_dim", "ssm_state_size", "index_topk"], 16),
    **dict.fromkeys(["linear_key_head_dim", "linear_value_head_dim", "hidden_size_per_layer_input"], 16),
    **dict.fromkeys(["qk_rope_head_dim", "qk_nope_head_dim", "mamba_n_heads", "mamba_num_heads", "num_heads"], 8),
    **dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"], 32),
    **dict.fromkeys(["max_position_embeddings", "n_positions"], 512),
    **dict.fromkeys(["n_group", "topk_group", "first_k_dense_replace", "num_dense_layers"], 1),
    **dict.fromkeys(["vocab_size", "vocab_size_per_layer_input"], WORDS),
    "rotary_dim": 8, "linear_num_value_heads": 4, "sliding_window": 64, "pad_token_id": 0, "eos_token_id": 2,
    "bos_token_id": 1,
}  # fmt: skip
"""What makes a config small, of whatever it has."""

OFTEN = ["bloom", "deepseek_v3", "gemma4", "gpt2", "gptj", "llama4", "mamba2", "mpt", "nemotron_h", "qwen3_next"]
BY_LENGTH = {"deepseek_v4", "hy_v4"}
"""Families whose scores depend on the length of the row, padding included, also in plain transformers."""

NOT_OF_TEXT = {"emu3", "git", "mllama"}
TAKES_A_MEAN = {
    "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "cpmant", "marian", "mbart", "mvp", "pegasus",
    "plbart", "prophetnet", "trocr", "whisper", "xlnet",
}  # fmt: skip


def small_config(kind: str) -> Any:
    """The config of a small model without dropout; raise whatever transformers does where the sizes do not fit."""
    usual = CONFIG_MAPPING[kind]()

    def shrink(part: Any) -> dict[str, Any]:
        known = part.to_dict()
        values = {key: value for key, value in SIZES.items() if key in known}
        values |= {
            key: 0.0 for key, value in known.items() if isinstance(value, float) and ("drop" in key or "jitter" in key)
        }
        if "kv_lora_rank" in values:
            values["num_key_value_heads"] = 4
            values.pop("head_dim", None)
        if kinds := known.get("layer_types"):
            several = list(dict.fromkeys(kinds)) * 2
            values["layer_types"] = several[: max(2, len(several) // 2)]
            values |= {key: len(values["layer_types"]) for key in values if key.endswith(("layers", "n_layer"))}
        return values

    if getattr(usual, "text_config", None) is not None and not isinstance(usual.text_config, dict):
        return CONFIG_MAPPING[kind](text_config=shrink(usual.text_config))
    return CONFIG_MAPPING[kind](**shrink(usual))


def small_model(kind: str) -> tuple[Any, str]:
    """A small model that answers, or None and why there is none."""
    torch.manual_seed(0)
    try:
        config = small_config(kind)
        with torch.device("meta"):
            size = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
        if size > LARGEST:
            return None, f"{size:,} weights"
        model = AutoModelForCausalLM.from_config(config)
        model(torch.arange(3, 13)[None], use_cache=False)
    except Exception as error:  # noqa: BLE001 - classes of transformers raise whatever they like
        return None, f"{type(error).__name__}: {error}"
    return model, ""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.slow if kind in OFTEN else pytest.mark.long)
        for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if kind not in ENCODERS | NOT_OF_TEXT
    ],
)
def test_a_step_does_not_depend_on_its_micro_batches(kind: str, inputs: Inputs, tmp_path: Path):
    model, why = small_model(kind)
    if model is None:
        assert kind not in OFTEN, why
        pytest.skip(f"no small model of it: {why[:100]}")
    source = tmp_path / "model"
    model.save_pretrained(source)
    for file in (*inputs.model.glob("tokenizer*"), *inputs.model.glob("chat_template*")):
        copy(file, source)
    text = model.config.get_text_config().model_type
    changes = {
        "model__attn": "eager" if "sdpa" in missing_attention(text) else "auto", "train__max_steps": 1,
        "train__learning_rate": 1e-9, "eval__before": False, "eval__after": False,
    }  # fmt: skip
    found = []
    for rows in (1, 8):
        of_rows = Inputs(source, inputs.train, inputs.held_out)
        if kind in TAKES_A_MEAN:
            with pytest.raises(ConfigError, match="takes a mean of its own"):
                train(tmp_path / str(rows), of_rows, train__batch_size=rows, **changes)
            return
        done = train(tmp_path / str(rows), of_rows, train__batch_size=rows, **changes)
        found.append([done.metrics[0][name] for name in ("loss", "grad_norm")])
    assert found[0] == pytest.approx(found[1], rel=1e-2 if kind in BY_LENGTH else 1e-5)
