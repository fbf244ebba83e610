"""Which libraries come into a run's process first, and which not at all. Nothing heavy is imported with this module."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from sftplay.config.schema.run import ModelConfig, RunConfig
from sftplay.errors import MachineError
from sftplay.launch.command.strategy import ZERO_STAGES
from sftplay.model.source import BUILTIN, is_quantised
from sftplay.places import cache_root

PATCHED_LIBRARIES = ("transformers", "trl", "peft")
"""Libraries that must not be in memory before it: classes imported from them earlier would be the unchanged ones."""

SETTINGS = {"UNSLOTH_DISABLE_STATISTICS": "1"}
"""It counts its users by a download otherwise."""

COMPILED = cache_root() / "unsloth"
"""Where it writes the code that it generates; left alone it uses a folder in the current directory."""


def import_unsloth() -> Any:
    """The package unsloth, imported in a process that has none of the libraries it changes yet.

    Raises:
        MachineError: it does not import here. Nothing takes its place.
    """
    early = [name for name in PATCHED_LIBRARIES if name in sys.modules]
    assert not early, f"unsloth must come before {', '.join(early)}"
    for key, value in {**SETTINGS, "UNSLOTH_COMPILE_LOCATION": str(COMPILED.resolve())}.items():
        os.environ.setdefault(key, value)
    try:
        return importlib.import_module("unsloth")
    except (ImportError, NotImplementedError, RuntimeError, AttributeError) as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise MachineError(
            f"unsloth cannot be imported ({reason})",
            where="tuning.backend unsloth",
            fix="install what it misses, see the run's log; or write tuning.backend: bnb",
        ) from error


def unneeded(cfg: RunConfig) -> list[str]:
    """The libraries that others import wherever they are installed, and that this run cannot need.

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
    """The libraries that opening the tokenizer of `model` and preparing rows cannot need.

    transformers imports torch wherever it is installed. A builtin model may have to be made first, and foreign code may
    use anything.
    """
    return [] if model.trust_remote_code or model.name.startswith(BUILTIN) else ["torch", "accelerate"]
