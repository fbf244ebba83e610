"""The model that KL is measured against (grpo.beta above 0): the one that the run started with.

A fresh adapter changes nothing: switched off, it is that model, and no copy is held. A run that continues an adapter
holds a frozen copy of it, as small as the adapter. Full tuning holds the whole model twice, which TRL loads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from peft import get_peft_model_state_dict, set_peft_model_state_dict

REFERENCE = "ref"
"""The name under which TRL looks for an adapter to compare with (`_generate_and_score_completions`)."""


@contextmanager
def no_copy_by_trl(model: Any, args: Any) -> Iterator[None]:
    """Inside, TRL's constructor sees beta 0 where an adapter trains: it would copy every adapter, also a fresh one."""
    beta = args.beta
    if hasattr(model, "get_base_model"):
        args.beta = 0.0
    try:
        yield
    finally:
        args.beta = beta


def keep_reference(model: Any) -> None:
    """Hold a frozen copy of the adapter as it is now."""
    weights = get_peft_model_state_dict(model, adapter_name="default")
    model.add_adapter(REFERENCE, model.peft_config["default"])
    set_peft_model_state_dict(model, weights, adapter_name=REFERENCE)
    model.set_adapter("default")
    for name, parameter in model.named_parameters():
        if f".{REFERENCE}." in f"{name}.":
            parameter.requires_grad_(False)
