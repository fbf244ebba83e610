"""Merges the adapter a run starts from into its full-precision base, never into 4-bit weights."""

from __future__ import annotations

import fcntl
import shutil
from pathlib import Path
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from sftplay import log
from sftplay.config.schema.run import RunConfig
from sftplay.errors import MachineError, RunError
from sftplay.model.adapter import attach_adapter
from sftplay.model.source import locate
from sftplay.model.start_point import place
from sftplay.model.tokenizer import load_tokenizer
from sftplay.model.weights import open_model


def keep_merged(cfg: RunConfig, folder: Path, dtype: torch.dtype) -> Path:
    """The folder `folder/base` with the merged start of the settled `cfg`, made if it is not there.

    It appears under its name only when it is complete; of several processes one makes it and the others wait.
    """
    target, scratch = folder / "base", folder / ".base.part"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".base.lock").open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)  # the system lets go of it when the process dies
        if not target.is_dir():
            shutil.rmtree(scratch, ignore_errors=True)
            merged_start(cfg, dtype).save_pretrained(scratch)
            load_tokenizer(cfg.model).save_pretrained(scratch)
            scratch.rename(target)
            log.say(f"merged {cfg.model.adapter} into its base: {target}", "model")
    return target


def merged_start(cfg: RunConfig, dtype: torch.dtype) -> Any:
    """The base of the settled `cfg` with model.adapter merged into it, on the CPU in `dtype`.

    Each layer is merged in fp32 and rounded once.

    Raises:
        MachineError: the base cannot be read, or is stored quantised.
        RunError: a merged value is not finite.
    """
    name, adapter = locate(cfg.model.name), Path(str(cfg.model.adapter))
    log.status(f"merging {adapter} into {name}", "model")
    opened_in = torch.float32 if dtype == torch.float32 else None
    base = open_model(cfg, name, dtype=opened_in, revision=cfg.model.revision, is_plain=True)
    if getattr(base.config, "quantization_config", None):
        what = f"{name} is stored quantised; an adapter merged into rounded weights is not what was trained"
        fix = "leave model.merge_adapter out, or start from the same model in full precision"
        raise MachineError(what, where=place(cfg, "model.merge_adapter"), fix=fix)
    attached = attach_adapter(base, adapter).eval()
    part_tied_ends(base)
    for module in attached.modules():
        if isinstance(module, BaseTunerLayer):
            _merge_layer(module, dtype, adapter)
    whole = attached.unload().to(dtype)  # modules that trained in full take their place
    whole.requires_grad_(True)  # PEFT has frozen it
    resolve_tie(whole)
    for name, parameter in whole.named_parameters():
        if parameter.is_floating_point() and not bool(torch.isfinite(parameter).all()):
            what = f"merged, {name} holds values that are not finite or that {dtype} cannot hold"
            raise RunError(what, where=str(adapter), fix="use train.precision: bf16 or fp32, or train it again")
    return whole


def part_tied_ends(base: Any) -> None:
    """Part an input embedding and a head that share one weight, where an adapter sits on either.

    Merging into the one would change the other (https://github.com/huggingface/peft/issues/2777).
    """
    ends = (base.get_input_embeddings(), base.get_output_embeddings())
    if any(isinstance(end, BaseTunerLayer) for end in ends):
        first, last = (end.get_base_layer() if isinstance(end, BaseTunerLayer) else end for end in ends)
        if first.weight is last.weight:
            last.weight = nn.Parameter(last.weight.detach().clone())


def resolve_tie(model: Any) -> bool:
    """Tie head and input embedding again where they are still equal, else say in the config that they are two.

    True when they were one and are two now.
    """
    head = model.get_output_embeddings()
    if head is None or not model.config.get_text_config().tie_word_embeddings:
        return False
    embedding = model.get_input_embeddings()
    if torch.equal(embedding.weight, head.weight):
        head.weight = embedding.weight
        return False
    model.config.tie_word_embeddings = model.config.get_text_config().tie_word_embeddings = False
    return True


def _merge_layer(layer: Any, dtype: torch.dtype, adapter: Path) -> None:
    layer.get_base_layer().weight.data = layer.get_base_layer().weight.data.float()  # PEFT would round the update first
    try:
        layer.merge(safe_merge=True)
    except ValueError as error:
        fix = "train it again; look at the losses"
        raise RunError(f"cannot be merged ({error})", where=str(adapter), fix=fix) from error
    layer.get_base_layer().weight.data = layer.get_base_layer().weight.data.to(dtype)
