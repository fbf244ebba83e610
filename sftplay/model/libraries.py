"""Choose the libraries that a run's process imports first, and those that it never needs. Imports nothing heavy."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from sftplay.config.cluster import ZERO_STAGES
from sftplay.config.run import ModelConfig, RunConfig
from sftplay.errors import MachineError
from sftplay.model.source import BUILTIN, is_quantised
from sftplay.places import cache_root


def import_unsloth() -> Any:
    """Import the package unsloth, in a process without the libraries that it patches.

    Raises:
        MachineError: it does not import here. There is no fallback.
    """
    # Imported before it, the libraries that it patches would keep their classes unpatched.
    early = [name for name in ("transformers", "trl", "peft") if name in sys.modules]
    assert not early, f"unsloth must come before {', '.join(early)}"
    os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")  # else it counts its users by a download
    # By default the code that it generates goes to a folder in the current directory.
    os.environ.setdefault("UNSLOTH_COMPILE_LOCATION", str((cache_root() / "unsloth").resolve()))
    try:
        return importlib.import_module("unsloth")
    except (ImportError, NotImplementedError, RuntimeError, AttributeError) as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        what = f"unsloth cannot be imported ({reason})"
        fix = "install what it misses, see the run's log; or write tuning.backend: bnb"
        raise MachineError(what, where="tuning.backend unsloth", fix=fix) from error


def unneeded(cfg: RunConfig) -> list[str]:
    """Return the libraries that others import wherever they are installed, and that this run cannot need.

    PEFT imports bitsandbytes, which imports torch's inductor: a second of a core in every start (bitsandbytes 0.50,
    `backends/default/ops.py`). Accelerate imports DeepSpeed at the first step, which imports torch's export: half a
    second (accelerate 1.15, `utils/other.py`).
    """
    in_few_bits = (
        cfg.tuning.mode == "qlora"
        or any(word in str(cfg.train.optim) for word in ("8bit", "paged"))
        or is_quantised(cfg.model.name, cfg.model.revision)
    )
    return [*([] if in_few_bits else ["bitsandbytes"]), *([] if cfg.cluster.strategy in ZERO_STAGES else ["deepspeed"])]


def unneeded_for_rows(model: ModelConfig) -> list[str]:
    """Return the libraries that opening the tokenizer of `model` and preparing rows cannot need.

    transformers imports torch wherever it is installed. A builtin model may have to be made first, and foreign code may
    use anything.
    """
    return [] if model.trust_remote_code or model.name.startswith(BUILTIN) else ["torch", "accelerate"]
