"""Puts a LoRA adapter on a model, and describes what trains."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from peft import LoraConfig as PeftLora
from peft import get_peft_model
from torch import nn

from sftplay.config.schema import LoraConfig
from sftplay.errors import ConfigError, nearest_names


def add_adapter(model: Any, lora: LoraConfig) -> Any:
    """`model` as a PeftModel with a fresh adapter whose weights are fp32.

    fp32 adapters make a 4-bit run resume bit for bit; TRL would turn them into bf16
    (https://github.com/huggingface/trl/blob/v1.14.0/trl/trainer/sft_trainer.py, "When using QLoRA").

    Raises:
        ConfigError: a name in target_modules or modules_to_save fits no module, or one that cannot have a pair.
    """
    targets = lora.target_modules
    _check_names(model, lora)
    config = PeftLora(
        r=lora.r,
        lora_alpha=lora.alpha if lora.alpha is not None else 2 * lora.r,
        lora_dropout=lora.dropout,
        target_modules="all-linear" if targets == "auto" else list(targets),
        modules_to_save=list(lora.modules_to_save) or None,
        use_dora=lora.dora,
        use_rslora=lora.rslora,
        bias="none",
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():
        # Says that a tied head is trained apart from its embedding, which is what modules_to_save asks for.
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
        try:
            adapted = get_peft_model(model, config)
        except ValueError as error:
            raise ConfigError(
                f"PEFT cannot adapt these modules ({str(error).splitlines()[0]})",
                where="tuning.lora.target_modules",
                fix=f"name layers that multiply with a matrix, such as {', '.join(_linear_names(model)[:8])}",
            ) from error
    make_trainable_fp32(adapted)
    return adapted


def make_trainable_fp32(model: nn.Module) -> None:
    """Hold every weight that trains in fp32, whatever a library made of it."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            parameter.data = parameter.data.float()


def describe_parameters(model: nn.Module) -> dict[str, Any]:
    """Counts for the manifest: parameters, those that train, their dtypes, and real 4-bit layers."""
    parameters = list(model.parameters())
    trainable = [p for p in parameters if p.requires_grad]
    return {
        "parameters": sum(_count(p) for p in parameters),
        "trainable_parameters": sum(p.numel() for p in trainable),
        "trainable_dtypes": sorted({str(p.dtype).removeprefix("torch.") for p in trainable}),
        # By weights, not by modules: PEFT wraps each 4-bit layer in one of its own of the same class name.
        "four_bit_layers": sum(p.dtype == torch.uint8 and hasattr(p, "quant_state") for p in parameters),
    }


def _count(parameter: Any) -> int:
    state = getattr(parameter, "quant_state", None)
    return int(state.shape.numel()) if state is not None else int(parameter.numel())


def _linear_names(model: nn.Module) -> list[str]:
    named = model.named_modules()
    return sorted({name.rsplit(".", 1)[-1] for name, module in named if isinstance(module, nn.Linear)})


def _check_names(model: nn.Module, lora: LoraConfig) -> None:
    known = {name.rsplit(".", 1)[-1] for name, _ in model.named_modules() if name}
    full = [name for name, _ in model.named_modules()]
    targets = [] if lora.target_modules == "auto" else lora.target_modules
    for key, names in (("target_modules", targets), ("modules_to_save", lora.modules_to_save)):
        for name in names:
            if not any(path == name or path.endswith(f".{name}") for path in full):
                near = nearest_names(name, known)
                raise ConfigError(
                    f"no module of this model is called {name!r}",
                    where=f"tuning.lora.{key}",
                    fix=f"did you mean {near[0]!r}?" if near else f"use names such as {', '.join(sorted(known)[:8])}",
                    nearest=near,
                )
