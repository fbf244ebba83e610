"""Whether unsloth could be used with the libraries installed here, found out without importing it.

Importing it changes other libraries for the whole process, so only a training process may; `model.unsloth` does that.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec

OLDEST = "2026.10.9"
"""First release that trains without a GPU (the one before ends with "You need a GPU"), and the one this kit was tried
with. An install without a lower bound resolves to a release of 2025 that states no upper bounds of its own."""

PACKAGES = ("unsloth", "unsloth_zoo")

NEEDED = ("torch", "transformers", "trl", "datasets", "peft", "accelerate", "bitsandbytes")
"""Those of its requirements that training goes through. What else it names (torchvision, xformers, diffusers, ...) it
imports only where it is there: tried on a CPU without any of them."""


def find_unsloth_problem(*, has_gpu: bool) -> str:
    """Why unsloth cannot be used here; empty when nothing is known against it."""
    if find_spec("unsloth") is None:
        return "the package unsloth is not installed"
    return next(_problems(has_gpu=has_gpu), "")


def _problems(*, has_gpu: bool) -> Iterator[str]:
    from packaging.version import Version

    for package in PACKAGES:
        found = _installed(package)
        if found is None:
            yield f"the package {package} is not installed"
        elif Version(found) < Version(OLDEST):
            yield f"{package} {found} is too old, {OLDEST} is the first that is known to work"
        else:
            yield from _unmet(package, found)
    if not has_gpu and os.environ.get("UNSLOTH_DISABLE_CPU_FALLBACK") == "1":
        yield "there is no GPU, and UNSLOTH_DISABLE_CPU_FALLBACK=1 forbids it a CPU"


def _unmet(package: str, version: str) -> Iterator[str]:
    """The bounds in the package's own metadata that an installed library lies outside of."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    for text in metadata.requires(package) or []:
        wanted = Requirement(text)
        name = canonicalize_name(wanted.name)
        if name not in NEEDED or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
            continue
        found = _installed(name)
        broken = [str(bound) for bound in wanted.specifier if found and not bound.contains(found, prereleases=True)]
        if found is None:
            yield f"{package} {version} needs {name}, which is not installed"
        elif broken:
            yield f"{package} {version} wants {name} {', '.join(sorted(broken))}, and {found} is installed"


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
