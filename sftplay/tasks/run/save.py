"""Saves the result of a run: the tuned weights with tokenizer and chat template, loadable by plain libraries."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from sftplay.atomic import whole_folder
from sftplay.config.schema.run import RunConfig
from sftplay.deliver.export.merge import set_end_tokens
from sftplay.deliver.export.model_card import write_adapter_card
from sftplay.launch.run_folder import RunFolder
from sftplay.model.source import BUILTIN


def gather_weights(trainer: Any) -> dict[str, torch.Tensor] | None:
    """The weights to save, gathered from all ranks; None where every rank holds them whole.

    All ranks must call it; only the main one gets them.
    """
    if trainer.is_fsdp_enabled:
        weights = trainer.accelerator.get_state_dict(trainer.model)
    elif trainer.is_deepspeed_enabled and trainer.accelerator.state.deepspeed_plugin.zero_stage == 3:
        # Frozen weights are left out. With an adapter these are all the others.
        weights = trainer.deepspeed._zero3_consolidated_16bit_state_dict(
            exclude_frozen_parameters=hasattr(trainer.model, "peft_config")
        )
    else:
        return None
    return weights if trainer.accelerator.is_main_process else None


def leave_process_group() -> None:
    """End the process group on all ranks at once. Only the main rank continues.

    Otherwise gloo's threads may abort a rank's process at its end (torch 2.13: "terminate called without an active
    exception"), and the launcher then ends the main rank too.
    """
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def save_result(
    model: Any,
    tokenizer: Any,
    *,
    cfg: RunConfig,
    folder: RunFolder,
    base: str,
    weights: dict[str, torch.Tensor] | None = None,
) -> Path:
    """Save `adapter/` or `model/`, whole or not at all; one that an earlier attempt left is replaced.

    `weights` are the model's, where the model itself holds only a part of them. `base` is the folder or hub name that
    the model was loaded from. A builtin base is copied to `base/`, and the adapter points to that copy; a local base is
    named by its absolute path. So plain PEFT finds it without this kit.
    """
    target = folder.path / ("model" if cfg.tuning.mode == "full" else "adapter")
    if cfg.tuning.mode != "full":
        if cfg.model.name.startswith(BUILTIN):
            base = str(shutil.copytree(base, folder.path / "base", dirs_exist_ok=True))
        adapter = model.peft_config["default"]
        adapter.base_model_name_or_path = str(Path(base).resolve()) if Path(base).is_dir() else base
        adapter.revision = cfg.model.revision
    else:
        if weights is None:
            model.to(_saved_dtype(cfg))
        else:
            weights = {name: tensor.to(_saved_dtype(cfg)) for name, tensor in weights.items()}
        model.config.use_cache = True
        # The base's own end token is not always the one its chats end with.
        set_end_tokens(model.generation_config, tokenizer)
    with whole_folder(target, replaces=True) as scratch:
        # One that KL is measured against is no part of the result.
        only = {} if cfg.tuning.mode == "full" else {"selected_adapters": ["default"]}
        model.save_pretrained(scratch, state_dict=weights, **only)
        tokenizer.save_pretrained(scratch)
        if cfg.tuning.mode != "full":
            on_hub = None if Path(base).is_dir() else base
            write_adapter_card(scratch / "README.md", name=folder.path.resolve().name, base=on_hub)
    if cfg.tuning.mode == "full":
        shutil.rmtree(folder.path / "base", ignore_errors=True)  # one with rows for new tokens; the result has them
    return target


def _saved_dtype(cfg: RunConfig) -> torch.dtype:
    # Training holds fp32 weights; the result of a 16-bit run has the format in which it was computed.
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(str(cfg.train.precision), torch.float32)
