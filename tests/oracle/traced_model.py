"""Builds the model that a trace runs: transformers' own with PEFT's adapter, in the dtypes a run would hold it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from oracle.cases import TraceSettings
from oracle.gpu_kernels import four_bit_class, replaced

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def build_causal(config: Mapping[str, Any], how: TraceSettings) -> Any:
    """transformers' causal model of `config`, its matrices in 4 bits for qlora, on the tensors of the mode in force."""
    from transformers import AutoConfig, AutoModelForCausalLM

    content = _text_config(config)
    if how.layers is not None:
        content = _at_depth(content, how.layers)
    described = AutoConfig.for_model(content.pop("model_type"), **content)
    base = how.base or ("fp32" if how.method == "full" else "bf16")
    causal = AutoModelForCausalLM.from_config(described, dtype=DTYPES[base], attn_implementation=how.attention)
    causal.config.use_cache = False
    if how.method == "qlora":
        _quantise(causal, how.double_quant)
    if how.kbit_prepared:
        from peft import prepare_model_for_kbit_training

        return prepare_model_for_kbit_training(causal, use_gradient_checkpointing=False)
    return causal


def adapt(causal: Any, how: TraceSettings) -> Any:
    """`causal` with a LoRA pair on every target, or itself where everything trains."""
    if how.method == "full":
        return causal
    from peft import LoraConfig, get_peft_model

    from sftplay.model.adapter import every_linear_of_text

    targets = list(how.targets) if how.targets else every_linear_of_text(causal)
    ends = [causal.get_input_embeddings(), *([] if causal.config.tie_word_embeddings else [causal.lm_head])]
    names = [name.rpartition(".")[2] for name, module in causal.named_modules() if module in ends]
    lora = LoraConfig(
        r=how.r, lora_alpha=2 * how.r, lora_dropout=how.dropout, target_modules=targets, task_type="CAUSAL_LM",
        trainable_token_indices={name: list(range(how.new_rows)) for name in names} if how.new_rows else None,
    )  # fmt: skip
    # Module.to swaps tensors, which fake ones refuse; the dtype is set below.
    with replaced(nn.Module, "to", lambda module, *_args, **_more: module), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*fan_in_fan_out.*")  # of GPT-2's layers; PEFT sees to it
        model = get_peft_model(causal, lora)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(DTYPES[how.adapter])
    return model


def _quantise(causal: Any, double_quant: bool) -> None:
    from transformers.pytorch_utils import Conv1D

    layer_class = four_bit_class()
    head = causal.get_output_embeddings()
    for module in list(causal.modules()):
        for name, child in module.named_children():
            if child is head or not isinstance(child, (nn.Linear, Conv1D)):
                continue
            inputs, outputs = child.weight.shape if isinstance(child, Conv1D) else child.weight.T.shape
            setattr(module, name, layer_class(inputs, outputs, child.bias, double_quant))
    causal.is_loaded_in_4bit = True


def _text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part that describes the text model, as a copy."""
    return dict(config.get("text_config") or config)


def _at_depth(content: dict[str, Any], layers: int) -> dict[str, Any]:
    content["n_layer" if "n_layer" in content else "num_hidden_layers"] = layers
    for name, value in content.items():
        if name in ("layer_types", "no_rope_layers") and value:
            content[name] = list(value)[:layers]
    return content
