"""Merge a run's adapter into its full-precision base, and write the whole model for plain libraries.

It never merges into 4-bit weights: the base of a qlora run is opened unquantised. `merge_check` checks the result.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import cached_file

from sftplay import __version__, log
from sftplay.atomic import check_target, locked, use_umask
from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError, MachineError
from sftplay.launch.run_folder import RunFolder
from sftplay.model.hub import FOLDER_FIX, check_reachable, first_line, quieten_hub
from sftplay.model.merging import merge_adapter
from sftplay.model.source import is_hub_shaped, locate
from sftplay.model.start_point import resolve_names
from sftplay.model.tokenizer import load_tokenizer, set_end_tokens
from sftplay.model.weights import DTYPES
from sftplay.units import format_bytes

Dtype = Literal["fp32", "bf16", "fp16"]

RECORD = "merge.json"
"""The file next to merged weights that names their adapter."""

SHARD_BYTES = 5 * 10**9
"""Most bytes of one weight file, unless a single tensor is larger; the hub refuses files of 50 GB."""


def merge(cfg: RunConfig, folder: RunFolder, *, out: Path, dtype: Dtype | None = None) -> Path:
    """Write the run's adapter and base as one model to `out`; `dtype` None keeps the base's own.

    Safetensors shards, tokenizer with the trained chat template, and a generation config that ends answers where
    training did. `out` appears whole or not at all.

    Raises:
        ConfigError: the run has no adapter, or `out` exists.
        MachineError: the base cannot be read, is quantised itself, or the disk is too small.
        RunError: the adapter holds values that are not finite, or they do not fit `dtype`.
    """
    check_target(out)
    model, tokenizer = merged_model(cfg, folder, dtype=dtype)
    record = {"adapter_sha256": adapter_digest(folder), "dtype": str(model.dtype).removeprefix("torch.")}

    def fill(scratch: Path) -> None:
        save_whole(model, tokenizer, cfg=cfg, folder=folder, target=scratch)
        (scratch / RECORD).write_text(json.dumps({**record, "kit": __version__}, indent=1) + "\n", encoding="utf-8")

    return write_folder(out, size_bytes(model), fill=fill)


def merged_model(cfg: RunConfig, folder: RunFolder, *, dtype: Dtype | None) -> tuple[Any, Any]:
    """Return the merged model on the CPU in evaluation mode, with the run's tokenizer.

    Each layer is merged in fp32 and rounded once, to the base's dtype or to `dtype`.

    Raises:
        ConfigError: the run has no adapter.
        MachineError: the base cannot be read.
        RunError: a value is not finite, before or after rounding.
    """
    tokenizer = load_tokenizer(cfg.model, str(find_adapter(cfg, folder)))
    base = load_unquantised(cfg, folder)
    log.status("merging layer by layer", "merge")
    fix = "merge with the base's own dtype, or in bf16"
    whole, is_untied = merge_adapter(base, find_adapter(cfg, folder), dtype=DTYPES[dtype] if dtype else None, fix=fix)
    if is_untied:
        log.say("note: head and input embedding were one weight and are two now; the merged model holds both", "merge")
    set_end_tokens(whole.generation_config, tokenizer)
    return whole.eval(), tokenizer


def find_adapter(cfg: RunConfig, folder: RunFolder) -> Path:
    """Return the run's adapter folder. Raise ConfigError where the run has none; the message says what to do."""
    adapter = folder.path / "adapter"
    if adapter.is_dir():
        return adapter
    if cfg.tuning.mode == "full" and (folder.path / "model").is_dir():
        what = "tuning.mode is full, so there is no adapter to merge: the result is a whole model already"
        raise ConfigError(what, where=str(folder.path), fix=f"use {folder.path / 'model'} as it is, or `make export`")
    raise ConfigError("this run has no result yet", where=str(folder.path), fix=folder.remedy)


def load_unquantised(cfg: RunConfig, folder: RunFolder, *, dtype: torch.dtype | None = None) -> Any:
    """Load the base of the run's adapter, on the CPU, never in 4 bits; in `dtype`, or in the one it is stored in. Raise
    MachineError where it cannot be read whole, or is stored quantised.
    """
    name, revision = find_base(cfg, folder)
    where = f"{cfg.describe_origin('model.name', unset='model')} {name}"
    log.status(f"opening {name} unquantised", "merge")
    source: dict[str, Any] = {"revision": revision, "trust_remote_code": cfg.model.trust_remote_code}
    source["local_files_only"] = is_hub_shaped(name) and not check_reachable(name, revision, where=where)
    quieten_hub()
    try:
        config = AutoConfig.from_pretrained(name, **source)
        if getattr(config, "quantization_config", None):
            what = "the base is stored quantised; an adapter merged into rounded weights is not what was trained"
            fix = "use base and adapter as they are, or train on the same model in full precision"
            raise MachineError(what, where=where, fix=f"{fix} (qlora rounds it itself)")
        model, loading = AutoModelForCausalLM.from_pretrained(
            name, config=config, dtype=dtype or "auto", output_loading_info=True,
            use_safetensors=None if cfg.model.allow_pickle else True, **source,
        )  # fmt: skip
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        fix = f"check the name, the connection and the files, {FOLDER_FIX}"
        raise MachineError(f"the base cannot be loaded ({first_line(error)})", where=where, fix=fix) from error
    if missing := loading["missing_keys"]:
        what = f"the base lacks {len(missing)} weights, {min(missing)} for one"
        raise MachineError(what, where=where, fix="check its files")
    return model


def find_base(cfg: RunConfig, folder: RunFolder) -> tuple[str, str | None]:
    """Return the name or folder of the base, and its revision. A run that starts from merged weights keeps a copy."""
    kept_base = folder.path / "base"
    if kept_base.is_dir():
        return str(kept_base), None
    model = resolve_names(cfg).model
    return locate(model.name), model.revision


def save_whole(
    model: Any, tokenizer: Any, *, cfg: RunConfig, folder: RunFolder, target: Path, shard_bytes: int = SHARD_BYTES
) -> None:
    """Save weights in safetensors shards of at most `shard_bytes`, configs, tokenizer and chat template.

    A vision model needs further files; the base's are copied unchanged.
    """
    model.config.use_cache = True
    model.save_pretrained(target, max_shard_size=shard_bytes)
    tokenizer.save_pretrained(target)
    for name in ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"):
        if file := find_base_file(cfg, folder, name=name):
            shutil.copyfile(file, target / name)


def find_base_file(cfg: RunConfig, folder: RunFolder, *, name: str) -> Path | None:
    """Return a file next to the base's weights, None when it is missing or cannot be fetched."""
    base, revision = find_base(cfg, folder)
    try:
        file = cached_file(
            base, name, revision=revision, _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False, _raise_exceptions_for_gated_repo=False,
        )  # fmt: skip
    except OSError:  # a folder that no longer exists
        return None
    return Path(file) if file else None


def size_bytes(model: nn.Module) -> int:
    """Return the bytes of the weights in a file, each counted once."""
    return sum(p.numel() * p.element_size() for p in {id(p): p for p in model.parameters()}.values())


def move_to_gpu(model: nn.Module) -> None:
    """Move the model to the GPU where there is one with room for it."""
    if torch.cuda.is_available() and torch.cuda.mem_get_info()[0] > 1.3 * size_bytes(model):
        model.to("cuda")


def adapter_digest(folder: RunFolder) -> str:
    """Return the sha256 of the run's adapter weights."""
    with (folder.path / "adapter" / "adapter_model.safetensors").open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


SLACK_BYTES = 64 * 2**20
"""Room kept for tokenizer, configs and the file system's own tables."""


def write_folder(out: Path, weight_bytes: int, *, fill: Callable[[Path], None]) -> Path:
    """Make the folder `out` by `fill(scratch)` under a scratch name, then rename it into place.

    Raise ConfigError where `out` exists, or another process is making it; MachineError where the disk has no room for
    `weight_bytes`, or a file cannot be written.
    """
    scratch = out.with_name(f".{out.name}.part")
    try:
        scratch.mkdir(parents=True, exist_ok=True)
        with locked(scratch, waits=False), ExitStack() as behind:
            behind.callback(shutil.rmtree, scratch, ignore_errors=True)
            for left in scratch.iterdir():  # of an attempt that was killed
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            needed, free = weight_bytes + SLACK_BYTES, shutil.disk_usage(scratch).free
            if free < needed:
                what = f"{format_bytes(needed)} ({needed} bytes) are needed and {format_bytes(free)} are free"
                raise MachineError(what, where=str(out), fix="make room, or name a folder on another disk with OUT=")
            fill(scratch)
            use_umask(scratch)
            check_target(out)
            scratch.rename(out)
    except BlockingIOError:
        raise ConfigError("another process is writing it", where=str(out), fix="wait for it to end") from None
    except (OSError, SafetensorError) as error:
        what = f"cannot be written ({getattr(error, 'strerror', None) or str(error).splitlines()[0]})"
        raise MachineError(what, where=str(out), fix="make room, or name another folder with OUT=") from error
    return out
