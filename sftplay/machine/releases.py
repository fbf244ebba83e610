"""Names that other libraries have changed, as the installed releases know them.

The kit's environment and unsloth's hold different releases, so a name is looked up in the library itself.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

WORD_OF_BEFORE = "gradient_checkpointing"

PLAIN_RECOMPUTATION = {"use_reentrant": False}
"""For `torch.utils.checkpoint`: the kind that goes with frozen weights and with DDP."""


@cache
def recomputation() -> str:
    """The word for recomputing activations that is in the names of arguments and methods of transformers.

    New releases call it activation_checkpointing, and warn of the word they had before.
    """
    from transformers import TrainingArguments

    new = "activation_checkpointing"
    return new if new in TrainingArguments.__dataclass_fields__ else WORD_OF_BEFORE


def as_named_here(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a TrainingArguments by their names of today. It takes old names too, and passes over them beside a
    new one."""
    return {name.replace(WORD_OF_BEFORE, recomputation()): value for name, value in arguments.items()}


def recomputation_arguments(*, recomputes: bool) -> dict[str, Any]:
    """The arguments of a TrainingArguments that switch it on or off."""
    word = recomputation()
    return {word: recomputes, f"{word}_kwargs": dict(PLAIN_RECOMPUTATION) if recomputes else None}


def page_argument() -> str:
    """The name of the argument of ContinuousBatchingConfig that says how many tokens a page of its cache holds.

    transformers 5.17 calls it block_size; later releases call it page_size and warn of the name before.
    """
    from transformers import ContinuousBatchingConfig

    return "page_size" if "page_size" in ContinuousBatchingConfig.__dataclass_fields__ else "block_size"


def is_recomputing(model: Any) -> bool:
    """True when a model of transformers recomputes its activations; False for any other model."""
    return bool(getattr(model, f"is_{recomputation()}", False))


def recompute(model: Any) -> None:
    """Let a model of transformers compute its layers anew in backward passes."""
    word = recomputation()
    getattr(model, f"{word}_enable")(**{f"{word}_kwargs": dict(PLAIN_RECOMPUTATION)})


@contextmanager
def nothing_recomputed(model: Any) -> Iterator[None]:
    """The model without recomputation, which a cache does not go with; switched on again afterwards if it was on."""
    word = recomputation()
    was_on = is_recomputing(model)
    if was_on:
        getattr(model, f"{word}_disable")()
    try:
        yield
    finally:
        if was_on:
            recompute(model)


TAKEN_BY_TRL = ("0.22.0", "0.31.0")
"""Oldest and newest vLLM that trl 1.16 takes."""


def vllm_problem() -> str:
    """Why trl cannot use the installed vLLM; empty where it can, or where no release of vLLM is installed.

    trl itself only warns (1.16, import_utils.py, `is_vllm_available`), and fails later.
    """
    oldest, newest = vllm_range()
    try:
        installed = version("vllm")
    except PackageNotFoundError:
        return ""
    numbers = [_numbers(each) for each in (oldest, installed, newest)]
    return "" if numbers == sorted(numbers) else f"trl takes vllm {oldest} to {newest}, and {installed} is installed"


def vllm_range() -> tuple[str, str]:
    """Oldest and newest vLLM that the installed trl names, read from its source: an import of trl takes seconds."""
    spec = find_spec("trl")
    source = Path(spec.origin).with_name("import_utils.py") if spec and spec.origin else None
    text = source.read_text(encoding="utf-8") if source and source.is_file() else ""
    found = re.search(r'Version\("([\d.]+)"\) <= _vllm_base_version <= Version\("([\d.]+)"\)', text)
    return (found[1], found[2]) if found else TAKEN_BY_TRL


def _numbers(release: str) -> tuple[int, ...]:
    return tuple([*map(int, re.findall(r"\d+", release.partition("+")[0])), 0, 0][:3])


def hub_client() -> ModuleType:
    """The library by which the hub's client speaks HTTP, for its classes of errors: httpx or httpx2."""
    from huggingface_hub.errors import HfHubHTTPError

    error = next(kind for kind in HfHubHTTPError.__mro__ if kind.__name__ == "HTTPError")
    return sys.modules[error.__module__.partition(".")[0]]
