"""Load a model to train from a resolved config, or a finished run's model to answer with.

It never falls back silently: a model that cannot be loaded as asked is an error."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
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
from sftplay.log import local_rank, status, world_size
from sftplay.model.adapter import add_adapter, attach_adapter, continue_adapter
from sftplay.model.source import locate
from sftplay.model.start_point import resolve_names
from sftplay.model.tokenizer import load_tokenizer
from sftplay.model.weights import frozen_dtype, open_model
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


def load_start(cfg: RunConfig, *, source: str | None = None, is_on_host: bool = False) -> Any:
    """Load the base with the backend that the run of `cfg` trains with. Inference uses `load_base` directly.

    `is_on_host` leaves a model that will be split in the host's memory. Several processes of DeepSpeed open it in 16
    bits, to which DeepSpeed rounds it anyway (`DeepSpeedEngine._configure_distributed_model`).
    """
    status(f"opening {cfg.model.name}", "model")
    if cfg.tuning.backend != "unsloth":
        is_rounded = world_size() > 1 and cfg.cluster.strategy.startswith("zero")
        return load_base(cfg, source=source, is_on_host=is_on_host, is_rounded=is_rounded)
    from sftplay.model.unsloth_model import open_by_unsloth

    cfg = resolve_names(cfg)
    revision = cfg.model.revision if source is None else None
    return open_by_unsloth(cfg, source or locate(cfg.model.name), revision=revision)


def start_adapter(model: Any, cfg: RunConfig, *, new_ids: Sequence[int] = ()) -> Any:
    """Return `model` from `load_start` with a new adapter by the same backend; the rows of `new_ids` train too.

    Raises:
        ConfigError: a name in tuning.lora fits no module, or one that cannot have a pair.
    """
    if cfg.tuning.backend == "unsloth":
        from sftplay.model.unsloth_model import adapt_by_unsloth

        return adapt_by_unsloth(model, cfg)
    return add_adapter(model, cfg.tuning.lora, new_ids=new_ids)


def load_base(cfg: RunConfig, *, source: str | None = None, is_on_host: bool = False, is_rounded: bool = False) -> Any:
    """Load the model that the run of `cfg` starts from, on this process's device, in 4 bits for qlora.

    That is the base; with model.adapter a PeftModel of the base with that adapter, ready to train, or the base with
    the adapter merged into it. Weights are fp32 when everything trains (a 16-bit copy would lose small updates), else
    the run's precision; with `is_rounded` always that. `source` is a folder of the run to read instead, such as the
    one from `stored_base`. `is_on_host` keeps weights that are not in 4 bits off the device.

    Raises:
        ConfigError: model.name or model.adapter cannot be what the run starts from.
        MachineError: the weights cannot be read, or some are missing.
    """
    dtype = frozen_dtype(cfg) if is_rounded else _start_dtype(cfg)
    if source is not None:
        return open_model(cfg, source, dtype=dtype, is_on_host=is_on_host)
    cfg = resolve_names(cfg)
    if cfg.model.adapter is None or not cfg.model.merge_adapter:
        base = _open_named(cfg, dtype, is_on_host=is_on_host)
        adapter = cfg.model.adapter
        return base if adapter is None else continue_adapter(base, cfg.tuning.lora, adapter=Path(adapter))

    if cfg.tuning.mode == "full":
        merged = merged_start(cfg, dtype)
        return merged.to(f"cuda:{local_rank()}") if torch.cuda.is_available() and not is_on_host else merged
    with TemporaryDirectory() as scratch:  # 4-bit weights are made from files only
        return load_base(cfg, source=str(keep_base(cfg, Path(scratch), dtype=dtype)), is_on_host=is_on_host)


def stored_base(cfg: RunConfig, folder: Path, *, new_tokens: Sequence[NewToken] = ()) -> str | None:
    """Return the base that a run keeps in its own folder, made if it is missing; None when it needs none.

    A merged base is kept, and one with rows for new tokens, so that the adapter trained on it has one that plain PEFT
    can load.
    """
    cfg = resolve_names(cfg)
    is_kept = cfg.tuning.mode != "full" or (cfg.task.turns == 1 and cfg.grpo.beta > 0)  # TRL loads it once more
    if not new_tokens and not (cfg.model.merge_adapter and is_kept):
        return None

    return str(keep_base(cfg, folder, dtype=_start_dtype(cfg), new_tokens=new_tokens).resolve())


def load_result(cfg: RunConfig, folder: Path) -> Any:
    """Load the tuned model of a finished run, in evaluation mode: `folder/model`, or the base with `folder/adapter`."""
    if (folder / "model").is_dir():
        return open_model(cfg, str(folder / "model"), dtype=frozen_dtype(cfg)).eval()
    if (kept_base := folder / "base").is_dir():
        base = load_base(cfg, source=str(kept_base))
    else:
        base = _open_named(resolve_names(cfg), _start_dtype(cfg))
    return attach_adapter(base, folder / "adapter").eval()


def load_untrained(cfg: RunConfig, folder: Path) -> Any:
    """Load the model that a finished run started from, in evaluation mode, with rows for its tokenizer's tokens."""
    from sftplay.model.embedding_rows import add_rows
    from sftplay.model.new_tokens import kept_tokens

    tokens, kept_base = kept_tokens(folder), folder / "base"
    if tokens and kept_base.is_dir():
        return load_base(cfg, source=str(kept_base)).eval()
    base = load_base(cfg)
    add_rows(base, tokens)
    return base.eval()


def _open_named(cfg: RunConfig, dtype: torch.dtype, *, is_on_host: bool = False) -> Any:
    revision = cfg.model.revision
    return open_model(cfg, locate(cfg.model.name), dtype=dtype, revision=revision, is_on_host=is_on_host)


def _start_dtype(cfg: RunConfig) -> torch.dtype:
    return torch.float32 if cfg.tuning.mode == "full" else frozen_dtype(cfg)
