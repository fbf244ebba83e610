"""Saves the result of a run: the tuned weights with tokenizer and chat template, loadable by plain libraries."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from sftplay import log
from sftplay.atomic import whole_folder
from sftplay.config.run import RunConfig
from sftplay.export.model_card import write_adapter_card
from sftplay.launch.run_folder import RunFolder
from sftplay.model.source import BUILTIN
from sftplay.model.tokenizer import set_end_tokens
from sftplay.train.upstream import gather_zero3_weights

RESULT_ADAPTERS = ("default", "guide")
"""Names of the adapters that a run leaves: the first in adapter/ itself, others in folders of their names below it."""


def gather_weights(trainer: Any) -> dict[str, dict[str, torch.Tensor]] | None:
    """Gather the weights to save from all ranks; None where every rank holds them whole.

    Those of the trainer's model are named "". All ranks must call it; only the main one gets them.
    """
    if hasattr(trainer, "whole_weights"):
        weights = trainer.whole_weights()
        return weights if trainer.accelerator.is_main_process else None
    if trainer.is_fsdp_enabled:
        weights = trainer.accelerator.get_state_dict(trainer.model)
    elif trainer.is_deepspeed_enabled and trainer.accelerator.state.deepspeed_plugin.zero_stage == 3:
        # Frozen weights are left out. With an adapter these are all the others.
        weights = gather_zero3_weights(trainer, leaves_out_frozen=hasattr(trainer.model, "peft_config"))
    else:
        return None
    return {"": weights} if trainer.accelerator.is_main_process else None


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
    weights: Mapping[str, dict[str, torch.Tensor]] | None = None,
    others: Mapping[str, Any] | None = None,
) -> Path:
    """Save `adapter/` or `model/`, whole or not at all; one that an earlier attempt left is replaced.

    `weights` are the models' by their names, "" for `model`, where a model itself holds only a part of them. `base` is
    the folder or hub name that the model was loaded from. A builtin base is copied to `base/`, and the adapter points
    to that copy; a local base is named by its absolute path. So plain PEFT finds it without this kit. `others` are
    further models of the run; each is saved in a folder of its name below the result.
    """
    is_full = cfg.tuning.mode == "full"
    target = folder.path / ("model" if is_full else "adapter")
    # Training holds fp32 weights; the result of a 16-bit run has the format in which it was computed.
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(str(cfg.train.precision), torch.float32)
    if not is_full and cfg.model.name.startswith(BUILTIN):
        base = str(shutil.copytree(base, folder.path / "base", dirs_exist_ok=True))
    if not is_full and Path(base).is_dir():
        base = str(Path(base).resolve())
    with whole_folder(target, replaces=True) as scratch:
        for name, part in {"": model, **(others or {})}.items():
            state = weights.get(name) if weights else None
            if not is_full:
                _save_adapters(part, scratch, base=base, revision=cfg.model.revision, weights=state)
                continue
            if state is None:
                part.to(dtype)
            else:
                rounded = {id(tensor): tensor.to(dtype) for tensor in state.values()}
                state = {key: rounded[id(tensor)] for key, tensor in state.items()}  # tied weights stay one tensor
            part.config.use_cache = True
            # The base's own end token is not always the one its chats end with.
            set_end_tokens(part.generation_config, tokenizer)
            part.save_pretrained(scratch / name, state_dict=state)
            tokenizer.save_pretrained(scratch / name)
        if not is_full:
            tokenizer.save_pretrained(scratch)
            on_hub = None if Path(base).is_dir() else base
            write_adapter_card(scratch / "README.md", name=folder.path.resolve().name, base=on_hub)
    if is_full:
        shutil.rmtree(folder.path / "base", ignore_errors=True)  # one with rows for new tokens; the result has them
    log.say(f"result: {target}")
    return target


def _save_adapters(
    model: Any, folder: Path, *, base: str, revision: str | None, weights: dict[str, torch.Tensor] | None
) -> None:
    # The adapter that KL is measured against is no part of the result. PEFT gives all but the first a folder.
    names = [name for name in RESULT_ADAPTERS if name in model.peft_config]
    for name in names:
        model.peft_config[name].base_model_name_or_path = base
        model.peft_config[name].revision = revision
    model.save_pretrained(folder, state_dict=weights, selected_adapters=names)
