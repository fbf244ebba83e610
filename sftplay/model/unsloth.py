"""Brings unsloth into a training process: once, and before the libraries that it changes.

Nothing heavy is imported with this module; what unsloth does with a model is in `unsloth_model`.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from sftplay.config.explain.other_kits import kit_answer
from sftplay.errors import ConfigError, MachineError
from sftplay.places import cache_root

CHANGED_BY_IT = ("transformers", "trl", "peft")
"""Libraries that must not be in memory before it: classes imported from them earlier would be the unchanged ones."""

SETTINGS = {"UNSLOTH_DISABLE_STATISTICS": "1"}
"""It counts its users by a download otherwise."""

WATCHED = ("bf16", "fp16", "optim", "gradient_checkpointing", "dataloader_pin_memory")
"""Arguments of TRL's config that the kit decides and unsloth rewrites on a CPU."""

COMPILED = cache_root() / "unsloth"
"""Where it writes the code that it generates; left alone it uses a folder in the current directory."""


def import_first() -> Any:
    """The package unsloth, imported in a process that has none of the libraries it changes yet.

    Raises:
        MachineError: it does not import here. Nothing takes its place.
    """
    early = [name for name in CHANGED_BY_IT if name in sys.modules]
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


def check_arguments(given: dict[str, Any], taken: Any) -> None:
    """Refuse a run when unsloth has changed one of its arguments while TRL's config was made.

    On a CPU it switches off 16-bit numbers, and optimizers and kernels that it thinks a CPU has not.

    Raises:
        ConfigError: naming the first such argument, as given and as taken.
    """
    for key in WATCHED:
        found = getattr(taken, key)
        found = getattr(found, "value", found)
        if key in given and found != given[key]:
            answer = kit_answer(key)
            assert answer, f"{key} is decided by no key"
            what = f"unsloth turns {key} from {given[key]} into {found} on this machine"
            raise ConfigError(what, where=answer.key, fix=f"write another {answer.key}, or tuning.backend: bnb")
