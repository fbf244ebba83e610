"""The code path that the kit's own run of a config takes: what `model/load`, `tasks/window` and TRL do, as bytes.

Weights are fp32 where everything trains and in the run's precision beside an adapter, whose weights are fp32; 16-bit
precision is autocast. The caller of the loss drops the scores before backward.
"""

from __future__ import annotations

from sftplay.config.schema.run import Optimizer as OptimizerName
from sftplay.config.schema.run import RunConfig
from sftplay.plan.memory.execution import Adapter, Execution, Head, Optimizer

OPTIMIZERS: dict[OptimizerName, Optimizer] = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_8bit": "adamw_8bit",
    "paged_adamw_8bit": "adamw_8bit",
    "paged_adamw_32bit": "adamw",
    "adafactor": "adafactor",
    "sgd": "sgd",
}
"""Paged states count in full: they leave the card only once it is full."""

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def execution_of(cfg: RunConfig) -> Execution:
    """The code path of a config in which precision, attention, loss head and optimizer are decided."""
    mode, train = cfg.tuning.mode, cfg.train
    compute = BYTES[str(train.precision)]
    weights = 4 if mode == "full" else compute
    # A padded batch needs a mask, with which transformers copies grouped keys and values out to the heads.
    is_masked = cfg.model.attn != "flash_attention_2"
    return Execution(
        weight_bytes=weights,
        compute_bytes=compute,
        stream_bytes=weights,
        four_bit=mode == "qlora",
        double_quant=cfg.tuning.double_quant,
        has_autocast=compute < 4,
        adapter=None if mode == "full" else _adapter(cfg),
        checkpointing=train.gradient_checkpointing,
        attention="eager" if cfg.model.attn == "eager" else "efficient" if is_masked else "flash",
        repeats_kv=is_masked,
        is_masked=is_masked,
        head=_head(cfg),
        logits_bytes=compute,
        optimizer=OPTIMIZERS[train.optim],  # type: ignore[index]
        is_foreach=train.optim == "adamw_torch",
    )


def _head(cfg: RunConfig) -> Head:
    head = cfg.train.loss_head
    return "chunked" if head == "chunked" else "liger" if head == "liger" else "standard"


def _adapter(cfg: RunConfig) -> Adapter:
    lora = cfg.tuning.lora
    return Adapter(
        rank=lora.r,
        targets=None if lora.target_modules == "auto" else tuple(lora.target_modules),
        has_dropout=lora.dropout > 0,
        is_dora=lora.dora,
        in_full=tuple(lora.modules_to_save),
    )
