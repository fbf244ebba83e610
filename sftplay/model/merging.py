"""Merge an adapter into its base, each layer in fp32, and keep a base that a run has changed."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import nn

from sftplay import log
from sftplay.atomic import locked, whole_folder
from sftplay.config.run import RunConfig
from sftplay.errors import MachineError, RunError
from sftplay.model.adapter import attach_adapter
from sftplay.model.source import locate
from sftplay.model.tokenizer import load_tokenizer
from sftplay.model.weights import open_model
from sftplay.units import format_bytes

if TYPE_CHECKING:
    from sftplay.model.new_tokens import NewToken


def keep_base(cfg: RunConfig, folder: Path, *, dtype: torch.dtype, new_tokens: Sequence[NewToken] = ()) -> Path:
    """Return the folder `folder/base` with the model that the resolved `cfg` starts from, made if it is missing.

    That is the merged start in `dtype`, or the base as it is stored; either with rows for `new_tokens`. It appears
    under its name only when it is complete; of several processes one makes it and the others wait.
    """
    from sftplay.model.embedding_rows import add_rows
    from sftplay.model.new_tokens import add_to

    target = folder / "base"
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / ".base.lock"):
        if target.is_dir():
            return target
        merges = cfg.model.merge_adapter
        with whole_folder(target) as scratch:
            start = merged_start(cfg, dtype) if merges else _plain_base(cfg, None)
            tokenizer = load_tokenizer(cfg.model)
            add_to(tokenizer, new_tokens)
            add_rows(start, new_tokens)
            needed = sum(weight.nbytes for weight in start.parameters())
            if (free := shutil.disk_usage(scratch).free) < needed:
                sizes = f"{format_bytes(needed)} and {format_bytes(free)} are free"
                fix = "make room, or name a folder on another disk: output_dir"
                where = str(scratch.parent)
                raise MachineError(f"the base that this run trains on needs {sizes}", where=where, fix=fix)
            start.save_pretrained(scratch)
            tokenizer.save_pretrained(scratch)
    if merges:
        log.say(f"merged {cfg.model.adapter} into its base: {target}", "model")
    if new_tokens:
        log.say(f"the base with rows for {len(new_tokens)} new tokens: {target}", "model")
    return target


def merged_start(cfg: RunConfig, dtype: torch.dtype) -> Any:
    """Return the base of the resolved `cfg` with model.adapter merged into it, on the CPU in `dtype`.

    Each layer is merged in fp32 and rounded once.

    Raises:
        MachineError: the base cannot be read, or is stored quantised.
        RunError: a merged value is not finite.
    """
    adapter = Path(str(cfg.model.adapter))
    log.status(f"merging {adapter} into {cfg.model.name}", "model")
    base = _plain_base(cfg, torch.float32 if dtype == torch.float32 else None)
    whole, _ = merge_adapter(base, adapter, dtype=dtype, fix="use train.precision: bf16 or fp32, or train it again")
    whole.requires_grad_(True)  # PEFT has frozen it
    return whole


def _plain_base(cfg: RunConfig, dtype: torch.dtype | None) -> Any:
    name = locate(cfg.model.name)
    base = open_model(cfg, name, dtype=dtype, revision=cfg.model.revision, is_plain=True)
    if getattr(base.config, "quantization_config", None):
        key, change = ("model.merge_adapter", "an adapter merged into rounded weights is not what was trained")
        if not cfg.model.merge_adapter:
            key, change = "tuning.new_tokens", "it cannot be stored again with rows for new tokens"
        fix = f"leave {key} out, or start from the same model in full precision"
        raise MachineError(f"{name} is stored quantised; {change}", where=cfg.describe_origin(key), fix=fix)
    return base


def merge_adapter(base: Any, adapter: Path, *, dtype: torch.dtype | None, fix: str) -> tuple[Any, bool]:
    """Merge the adapter into `base`; return it in `dtype`, or with the dtype of each weight when that is None.

    Each layer is merged in fp32 and rounded once. The second value is True when head and input embedding were one
    weight before and are two now. `fix` is the advice where `dtype` is too narrow.

    Raises:
        RunError: a value is not finite, before or after rounding.
    """
    attached = attach_for_merging(base, adapter)
    for module in attached.modules():
        if isinstance(module, BaseTunerLayer):
            _merge_layer(module, dtype, adapter=adapter)
        elif isinstance(module, ModulesToSaveWrapper):
            module.modules_to_save.to(dtype or next(module.original_module.parameters()).dtype)
    whole = attached.unload()  # every layer is merged already; modules that trained in full replace the originals
    if dtype:
        whole.to(dtype)
    # Head and input embedding are tied again if they are still equal, else marked as untied in the config.
    head, embedding = whole.get_output_embeddings(), whole.get_input_embeddings()
    was_tied = head is not None and whole.config.get_text_config().tie_word_embeddings
    is_untied = bool(was_tied) and not torch.equal(embedding.weight, head.weight)
    if is_untied:
        whole.config.tie_word_embeddings = whole.config.get_text_config().tie_word_embeddings = False
    elif was_tied:
        head.weight = embedding.weight
    check_finite(whole, where=str(adapter), fix=fix)
    return whole, is_untied


def check_finite(model: nn.Module, *, where: str, fix: str) -> None:
    """Raise RunError where a weight holds a value that is not finite, perhaps since it was rounded to its dtype."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not bool(torch.isfinite(parameter).all()):
            kind = str(parameter.dtype).removeprefix("torch.")
            what = f"{name} holds values that {kind} cannot hold, or that are not finite"
            raise RunError(what, where=where, fix=fix)


def attach_for_merging(base: Any, adapter: Path) -> Any:
    """Return PEFT's model of `base` with the adapter in fp32, as it was trained.

    An input embedding and a head that share one weight are separated when the adapter changes either: merging into the
    one would change the other (https://github.com/huggingface/peft/issues/2777).
    """
    attached = attach_adapter(base, adapter).eval()
    ends = (base.get_input_embeddings(), base.get_output_embeddings())
    if any(isinstance(end, BaseTunerLayer) for end in ends):
        first, last = (end.get_base_layer() if isinstance(end, BaseTunerLayer) else end for end in ends)
        if first.weight is last.weight:
            last.weight = nn.Parameter(last.weight.detach().clone())
    return attached


def _merge_layer(layer: Any, dtype: torch.dtype | None, *, adapter: Path) -> None:
    kind = layer.parameter_name if isinstance(layer, ParamWrapper) else "weight"
    weight = getattr(layer.get_base_layer(), kind)
    rounded_to = dtype or weight.dtype
    weight.data = weight.data.float()  # PEFT would round the update first and then the sum
    try:
        layer.merge(safe_merge=True)
    except ValueError as error:
        fix = "train it again; look at the losses"
        raise RunError(f"cannot be merged ({error})", where=str(adapter), fix=fix) from error
    merged = getattr(layer.get_base_layer(), kind)
    merged.data = merged.data.to(rounded_to)
