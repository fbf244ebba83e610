"""The state of the model around TRL's constructor and its generation: dtypes, shards, the reference, the loss scale."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import get_peft_model_state_dict, set_peft_model_state_dict

REFERENCE = "ref"  # TRL's name of the reference adapter (`_generate_and_score_completions`)


@contextmanager
def dtypes_kept(args: Any, device: torch.device) -> Iterator[None]:
    """Inside, TRL does not convert the model to 16 bits before it generates; the model computes in its weights' dtypes.

    TRL would convert the whole model for good, with fp32 trainable weights and rotary frequencies (trl 1.16,
    `_generate_single_turn`).
    """
    before = args.bf16, args.fp16
    args.bf16 = args.fp16 = False
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        args.bf16, args.fp16 = before


@contextmanager
def gathered_root(model: Any) -> Iterator[None]:
    """Inside, every rank holds the weights outside the layers of `model`, where FSDP shards a model with an adapter."""
    if not (hasattr(model, "unshard") and hasattr(model, "peft_config")):
        yield
        return
    model._get_fsdp_state()._lazy_init()  # else the first layer that is called would take itself for the outermost
    model.unshard()
    try:
        yield
    finally:
        model.reshard()


@contextmanager
def no_copy_by_trl(model: Any, args: Any) -> Iterator[None]:
    """Inside, TRL's constructor sees beta 0 where an adapter trains; TRL would copy every adapter, also a new one."""
    beta = args.beta
    if hasattr(model, "get_base_model"):
        args.beta = 0.0
    try:
        yield
    finally:
        args.beta = beta


def keep_reference(model: Any) -> None:
    """Add a frozen copy of the current adapter."""
    weights = get_peft_model_state_dict(model, adapter_name="default")
    model.add_adapter(REFERENCE, model.peft_config["default"])
    set_peft_model_state_dict(model, weights, adapter_name=REFERENCE)
    model.set_adapter("default")
    for name, parameter in model.named_parameters():
        if f".{REFERENCE}." in f"{name}.":
            parameter.requires_grad_(False)


def read_loss_scale(scaler: Any, *, steps: int, taken: int) -> dict[str, float]:
    """Return the scale of torch's GradScaler for fp16, and the steps that it skipped since the first one.

    `taken` counts the steps of the schedule, which transformers advances only after a step of the optimizer.
    """
    return {"loss_scale": scaler.get_scale(), "skipped_steps": steps - taken}
