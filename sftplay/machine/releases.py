"""Releases of libraries: which ones go together, and what each calls a thing."""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from importlib import metadata
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

OLDEST = "2026.10.9"
"""The first release that trains without a GPU (the one before ends with "You need a GPU"). This kit was tried with it.
An install without a lower bound resolves to a release of 2025, which states no upper bounds."""

PACKAGES = ("unsloth", "unsloth_zoo")

NEEDED = ("torch", "transformers", "trl", "datasets", "peft", "accelerate", "bitsandbytes")
"""The requirements that training uses. unsloth imports the others (torchvision, xformers, diffusers, ...) only when
they are installed; this was tried on a CPU without any of them."""


def find_unsloth_mismatch(*, has_gpu: bool) -> str:
    """Why the installed unsloth cannot be used with the installed libraries; empty when no reason is known."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name
    from packaging.version import Version

    for package in PACKAGES:
        version = installed_version(package)
        if version is None:
            return f"the package {package} is not installed"
        if Version(version) < Version(OLDEST):
            return f"{package} {version} is too old, {OLDEST} is the first that is known to work"
        for requirement in map(Requirement, metadata.requires(package) or []):
            name = canonicalize_name(requirement.name)
            if name not in NEEDED or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
                continue
            installed = installed_version(name)
            if installed is None:
                return f"{package} {version} needs {name}, which is not installed"
            broken = [str(part) for part in requirement.specifier if not part.contains(installed, prereleases=True)]
            if broken:
                wanted = ", ".join(sorted(broken))
                return f"{package} {version} wants {name} {wanted}, and {installed} is installed"
    if not has_gpu and os.environ.get("UNSLOTH_DISABLE_CPU_FALLBACK") == "1":
        return "there is no GPU, and UNSLOTH_DISABLE_CPU_FALLBACK=1 forbids unsloth to use the CPU"
    return ""


def installed_version(package: str) -> str | None:
    """Version of an installed package, from its metadata; None when it is not installed."""
    with suppress(PackageNotFoundError):
        return metadata.version(package)
    return None


def page_argument() -> str:
    """ContinuousBatchingConfig's argument for tokens a page: block_size in transformers 5.17, page_size later."""
    from transformers import ContinuousBatchingConfig

    return "page_size" if "page_size" in ContinuousBatchingConfig.__dataclass_fields__ else "block_size"


TAKEN_BY_TRL = ("0.22.0", "0.31.0")  # oldest and newest vLLM that trl 1.16 takes

VLLM_INSTALL = "make install-vllm"  # the newest that trl 1.16 takes, and made for torch 2.13


def vllm_problem() -> str:
    """Why trl cannot use the installed vLLM; empty where it can, or where no release of vLLM is installed.

    trl itself only warns (1.16, import_utils.py, `is_vllm_available`), and fails later. The releases that it takes are
    read from its source: an import of trl takes seconds.
    """
    spec = find_spec("trl")
    source = Path(spec.origin).with_name("import_utils.py") if spec and spec.origin else None
    text = source.read_text(encoding="utf-8") if source and source.is_file() else ""
    found = re.search(r'Version\("([\d.]+)"\) <= _vllm_base_version <= Version\("([\d.]+)"\)', text)
    oldest, newest = (found[1], found[2]) if found else TAKEN_BY_TRL
    try:
        installed = version("vllm")
    except PackageNotFoundError:
        return ""
    parts = [re.findall(r"\d+", release.partition("+")[0]) for release in (oldest, installed, newest)]
    numbers = [[*map(int, part), 0, 0][:3] for part in parts]
    return "" if numbers == sorted(numbers) else f"trl takes vllm {oldest} to {newest}, and {installed} is installed"


def hub_client() -> ModuleType:
    """The library by which the hub's client speaks HTTP, for its classes of errors: httpx or httpx2."""
    from huggingface_hub.errors import HfHubHTTPError

    error = next(kind for kind in HfHubHTTPError.__mro__ if kind.__name__ == "HTTPError")
    return sys.modules[error.__module__.partition(".")[0]]
