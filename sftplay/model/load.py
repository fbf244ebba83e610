"""Load a model to train from a resolved config, or a finished run's model to answer with.

It never falls back silently: a model that cannot be loaded as asked is an error."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from sftplay.config.run import RunConfig
from sftplay.log import local_rank, status, world_size
from sftplay.model.adapter import add_adapter, attach_adapter, continue_adapter
from sftplay.model.source import locate
from sftplay.model.start_point import resolve_names
from sftplay.model.weights import frozen_dtype, open_model

if TYPE_CHECKING:
    from sftplay.model.new_tokens import NewToken


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

    from sftplay.model.merging import keep_base, merged_start

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

    from sftplay.model.merging import keep_base

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
