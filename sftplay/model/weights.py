"""Open a model's weights exactly as asked, or raise the reason: whole, from safetensors, without foreign code."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.integrations import sdpa_attention

from sftplay import log
from sftplay.config.cluster import SPLIT_WEIGHTS
from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError, MachineError
from sftplay.log import local_rank
from sftplay.model.hub import announce_trust, check_reachable, explain_failure, quieten_hub, refusing
from sftplay.startup import end_imports

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def open_model(
    cfg: RunConfig,
    name: str,
    *,
    dtype: torch.dtype | None,
    revision: str | None = None,
    is_plain: bool = False,
    is_on_host: bool = False,
) -> Any:
    """Open the model in the folder or of the hub name `name`, in `dtype`, None for the one it is stored in.

    On this process's device and, for qlora, in 4 bits; `is_plain` leaves it on the CPU and never quantises it, and
    `is_on_host` leaves it there unless it is in 4 bits, which a device makes.

    Raises:
        MachineError: the weights cannot be read, or some are missing.
        ConfigError: it needs code that ships with it, which is not trusted; or it cannot recompute, and is asked to.
    """
    end_imports()
    repeat_shared_keys()
    where = f"{cfg.describe_origin('model.name', unset='model')} {name}"
    options: dict[str, Any] = {
        "revision": revision, "trust_remote_code": cfg.model.trust_remote_code, "dtype": dtype or "auto",
        "attn_implementation": cfg.model.attn,
    }  # fmt: skip
    in_four_bits = cfg.tuning.mode == "qlora" and not is_plain
    if in_four_bits:
        # A strategy that splits weights over processes needs them stored in the type it computes in: the 4-bit codes
        # are then packed into numbers of that type.
        splits = cfg.cluster.strategy in SPLIT_WEIGHTS
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type=cfg.tuning.quant_type, bnb_4bit_compute_dtype=frozen_dtype(cfg),
            bnb_4bit_use_double_quant=cfg.tuning.double_quant,
            bnb_4bit_quant_storage=frozen_dtype(cfg) if splits else torch.uint8,
        )  # fmt: skip
    is_on_device = torch.cuda.is_available() and not is_plain and (in_four_bits or not is_on_host)
    options["device_map"] = {"": local_rank()} if is_on_device else None
    if not cfg.model.allow_pickle:
        options["use_safetensors"] = True
    if not check_reachable(name, revision, where=where):
        log.say(f"note: the hub does not answer; {name} is opened from the cache", "model")
        options["local_files_only"] = True
    announce_trust(cfg.model, f"the model {name}")
    quieten_hub()
    with refusing(lambda error: explain_failure(error, cfg.model, where=where)):
        model, found = AutoModelForCausalLM.from_pretrained(name, output_loading_info=True, **options)
    missing = sorted(found["missing_keys"])
    if missing:  # transformers fills them with random numbers without an error
        lack = f"{len(missing)} weights are missing, {missing[0]} for one"
        raise MachineError(f"the model cannot be loaded ({lack})", where=where, fix="check its files")
    if cfg.train.gradient_checkpointing and not is_plain and not model.supports_gradient_checkpointing:
        key, what = "train.gradient_checkpointing", f"{type(model).__name__} cannot compute its layers anew"
        raise ConfigError(what, where=cfg.describe_origin(key, unset="train"), fix=f"write {key}: false")
    if model.base_model is model:  # Llama 4's class names its decoder by a word that is none of its parts
        model.base_model_prefix = "model"
    keep_four_bit_exact(model)
    model.register_load_state_dict_pre_hook(take_own_format)
    if getattr(model.config.get_text_config(), "output_router_logits", False):
        model.register_forward_pre_hook(_leave_out_router_loss, with_kwargs=True)
    return model


def _leave_out_router_loss(_model: Any, given: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Where a cache is read, transformers 5.23 takes the mask of all tokens for a loss over the new ones, and fails."""
    return given, named | ({} if named.get("past_key_values") is None else {"output_router_logits": False})


def keep_four_bit_exact(model: Any) -> None:
    """Stop bitsandbytes from repacking 4-bit weights in evaluation mode on CPUs with AVX512-BF16.

    Repacking rounds the scales to bf16 for good, so that a run with evaluations would train on other weights than one
    without, and it fails where a layer's input width is no multiple of 64 (bitsandbytes 0.50, `Linear4bit.forward`).
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def repeat_shared_keys() -> None:
    """Have transformers repeat shared keys and values wherever no fused kernel supports grouped heads.

    Without a mask it leaves that to torch (`enable_gqa`). On a GPU only kernels for 16 bits from capability 8.0 on can
    do it (torch, transformers/cuda/sdp_utils.cpp: the memory-efficient one has `supports_grouped_query_attention`
    false); elsewhere torch writes out scores, heads x tokens^2 of each row (transformers #48633).
    """
    stock = sdpa_attention.use_gqa_in_sdpa
    if hasattr(stock, "__wrapped__"):
        return

    @wraps(stock)
    def use_gqa(mask: Any, key: Any, *rest: Any) -> bool:
        return bool(stock(mask, key, *rest)) and _has_grouped_kernel(key)

    sdpa_attention.use_gqa_in_sdpa = use_gqa


def _has_grouped_kernel(key: torch.Tensor) -> bool:
    kind = key.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else key.dtype
    is_half = dtype in (torch.float16, torch.bfloat16)
    return kind != "cuda" or (is_half and torch.cuda.get_device_capability(key.device) >= (8, 0))


def frozen_dtype(cfg: RunConfig) -> torch.dtype:
    """Return the dtype of a base that does not train: the run's precision."""
    # fp16 bases overflow in the norm layers of several families; with autocast the weights can stay fp16 only if
    # nothing but the adapter trains, which is the only case that reaches here.
    return DTYPES[str(cfg.train.precision)]


def take_own_format(model: Any, weights: dict[str, Any], prefix: str, *_: Any) -> None:
    """Turn the weights of a checkpoint, which has a tensor for each expert, into those of the model, which has one for
    all: the Trainer would pass them over (transformers 5.23, `_load_from_checkpoint` and `_load_best_model`)."""
    if prefix or not weights.keys() - model.state_dict().keys():
        return
    named = {"state_dict": dict(weights), "config": model.config, "dtype": torch.float32, "output_loading_info": True}
    whole, found = type(model).from_pretrained(None, **named)
    if missing := sorted(found["missing_keys"]):
        raise MachineError(f"a checkpoint lacks {len(missing)} weights, {missing[0]} for one", fix="begin the run anew")
    weights.clear()
    weights.update(whole.state_dict())
