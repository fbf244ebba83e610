"""What a second engine (vLLM) is sent of a model with an adapter: copies of weights, merged outside of the model.

TRL 1.16 merges the adapter into the base itself, sends it, and takes it out again. In 16 bits that rounds the base anew
at each step. Here a layer is copied, the copy is merged and sent, and the base is only read.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from sftplay.errors import ConfigError


def send_copies(generation: Any) -> None:
    """Make TRL's `VLLMGeneration` send merged copies.

    Raises:
        ConfigError: the base is held in 4 bits, or in shards; copies of such layers cannot be merged one by one.
    """
    if generation._dist.is_fsdp or any(hasattr(weight, "ds_id") for weight in generation.model.parameters()):
        raise ConfigError(
            "vLLM cannot be sent an adapter whose base is sharded",
            where="grpo.generation",
            fix="set cluster.strategy=ddp, or grpo.generation=transformers",
        )
    if any(hasattr(weight, "quant_state") for weight in generation.model.parameters()):
        raise ConfigError(
            "vLLM cannot be sent an adapter whose base is held in 4 bits",
            where="grpo.generation",
            fix="set tuning.mode=lora, or grpo.generation=transformers",
        )
    generation._iter_named_params = lambda: merged_copies(generation.model)


def merged_copies(model: Any) -> Iterator[tuple[str, Tensor]]:
    """The weights of a PEFT model by the names of its base, each with its adapter merged in; `model` is only read."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    base = model.get_base_model()
    adapted = {name: module for name, module in base.named_modules() if isinstance(module, BaseTunerLayer)}
    for name, layer in adapted.items():
        merged = copy.deepcopy(layer)
        merged.merge()
        for part, weight in merged.get_base_layer().named_parameters():
            yield f"{name}.{part}", weight.data
    for name, weight in base.named_parameters():
        owner = next((each for each in adapted if name.startswith(f"{each}.")), None)
        if owner is None and ".modules_to_save." not in name and ".original_module." not in name:
            yield name, weight.data
    for name, weight in base.named_parameters():
        before, _, after = name.partition(".modules_to_save.default.")
        if after:
            yield f"{before}.{after}", weight.data
