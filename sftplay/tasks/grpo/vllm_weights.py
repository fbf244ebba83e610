"""Weights that vLLM gets from the trained model."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from sftplay.errors import ConfigError
from sftplay.train.upstream import is_engine_fsdp, replace_sent_weights


def send_copies(generation: Any) -> None:
    """Make TRL's `VLLMGeneration` send merged copies of the weights. Raise ConfigError where the base is in 4 bits or
    sharded: copies of such layers cannot be merged one by one.
    """
    weights, problem = list(generation.model.parameters()), None
    if is_engine_fsdp(generation) or any(hasattr(weight, "ds_id") for weight in weights):
        problem = "sharded", "cluster.strategy=ddp"
    elif any(hasattr(weight, "quant_state") for weight in weights):
        problem = "held in 4 bits", "tuning.mode=lora"
    if problem:
        what, fix = f"vLLM cannot be sent an adapter whose base is {problem[0]}", f"set {problem[1]}"
        raise ConfigError(what, where="grpo.generation", fix=f"{fix}, or grpo.generation=transformers")
    replace_sent_weights(generation, lambda: merged_copies(generation.model))


def merged_copies(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a PEFT model, merged with the adapter, by the base model's names; `model` is only read."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    base = model.get_base_model()
    adapted = {name: module for name, module in base.named_modules() if isinstance(module, BaseTunerLayer)}
    for name, layer in adapted.items():
        merged = copy.deepcopy(layer)
        merged.merge()
        for part, weight in merged.get_base_layer().named_parameters():
            yield f"{name}.{part}", weight.data

    def is_adapted(name: str) -> bool:
        return any(name.startswith(f"{layer}.") for layer in adapted)

    for name, weight in base.named_parameters():
        before, _, after = name.partition(".modules_to_save.default.")
        if after:
            yield f"{before}.{after}", weight.data
        elif ".modules_to_save." not in name and ".original_module." not in name and not is_adapted(name):
            yield name, weight.data
