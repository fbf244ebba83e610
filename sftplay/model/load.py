"""From a resolved config to a model ready to train, or a finished run's model ready to answer.

Never falls back in silence: what cannot be loaded as asked is an error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from sftplay.config.schema import RunConfig
from sftplay.errors import MachineError
from sftplay.log import local_rank
from sftplay.model.locate import locate

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def load_base(cfg: RunConfig, *, source: str | None = None) -> Any:
    """The base model of `cfg` on this process's device, in 4 bits when `tuning.mode` is qlora.

    Weights are fp32 when everything trains (a 16-bit copy would lose small updates), else the run's precision.
    The attention kernel and dtype are those of the resolved config; `source` is a folder of the run to read instead.

    Raises:
        MachineError: the weights cannot be read, or some are missing.
    """
    name = source or locate(cfg.model.name)
    trains_base = cfg.tuning.mode == "full" and source is None
    dtype = torch.float32 if trains_base else _weight_dtype(cfg)
    model = _open_whole(
        name,
        where=f"{cfg.origins.get('model.name', 'model')} model.name {name}",
        revision=None if source else cfg.model.revision,
        trust_remote_code=cfg.model.trust_remote_code,
        dtype=dtype,
        attn_implementation=cfg.model.attn,
        quantization_config=quantization(cfg) if cfg.tuning.mode == "qlora" else None,
        device_map={"": local_rank()} if torch.cuda.is_available() else None,
    )
    keep_four_bit_exact(model)
    return model


def _open_whole(name: str, *, where: str, **options: Any) -> Any:
    fix = "check the name, the connection and the files; the run's log says more"
    try:
        model, found = AutoModelForCausalLM.from_pretrained(name, output_loading_info=True, **options)
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise MachineError(f"the model cannot be loaded ({first})", where=where, fix=fix) from error
    missing = sorted(found["missing_keys"])
    if missing:  # transformers fills them with random numbers and goes on
        lack = f"{len(missing)} weights are missing, {missing[0]} for one"
        raise MachineError(f"the model cannot be loaded ({lack})", where=where, fix=fix)
    return model


def keep_four_bit_exact(model: Any) -> None:
    """Stop bitsandbytes from repacking 4-bit weights in evaluation mode on CPUs with AVX512-BF16.

    Repacking rounds the scales to bf16 for good, so that a run with evaluations would train on other weights than one
    without, and it fails where a layer's input width is no multiple of 64 (bitsandbytes 0.50, `Linear4bit.forward`).
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def quantization(cfg: RunConfig) -> BitsAndBytesConfig:
    """How a qlora base is held: 4-bit codes, computed in the run's precision."""
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=cfg.tuning.quant_type,
        bnb_4bit_use_double_quant=cfg.tuning.double_quant,
        bnb_4bit_compute_dtype=_weight_dtype(cfg),
    )


def load_result(cfg: RunConfig, folder: Path) -> Any:
    """The tuned model of a finished run, in evaluation mode: `folder/model`, or the base with `folder/adapter`."""
    if (folder / "model").is_dir():
        return load_base(cfg, source=str(folder / "model")).eval()
    from peft import PeftModel

    base = load_base(cfg, source=str(folder / "base") if (folder / "base").is_dir() else None)
    return PeftModel.from_pretrained(base, str(folder / "adapter")).eval()


def _weight_dtype(cfg: RunConfig) -> torch.dtype:
    # fp16 bases overflow in the norm layers of several families; with autocast the weights can stay fp16 only if
    # nothing but the adapter trains, which is the only case that reaches here.
    return DTYPES[str(cfg.train.precision)]
