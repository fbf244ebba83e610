"""Whether unsloth works with the libraries installed here, without importing it.

An import of unsloth changes other libraries for the whole process. Therefore only a training process imports it
(`model.unsloth`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec

OLDEST = "2026.10.9"
"""The first release that trains without a GPU (the one before ends with "You need a GPU"). This kit was tried with it.
An install without a lower bound resolves to a release of 2025, which states no upper bounds."""

PACKAGES = ("unsloth", "unsloth_zoo")

NEEDED = ("torch", "transformers", "trl", "datasets", "peft", "accelerate", "bitsandbytes")
"""The requirements that training uses. unsloth imports the others (torchvision, xformers, diffusers, ...) only when
they are installed; this was tried on a CPU without any of them."""


def find_unsloth_problem(*, has_gpu: bool) -> str:
    """Why unsloth cannot be used here; empty when no reason is known."""
    if find_spec("unsloth") is None:
        return "the package unsloth is not installed"
    return next(_problems(has_gpu=has_gpu), "")


def _problems(*, has_gpu: bool) -> Iterator[str]:
    from packaging.version import Version

    for package in PACKAGES:
        version = installed_version(package)
        if version is None:
            yield f"the package {package} is not installed"
        elif Version(version) < Version(OLDEST):
            yield f"{package} {version} is too old, {OLDEST} is the first that is known to work"
        else:
            yield from _unmet(package, version)
    if not has_gpu and os.environ.get("UNSLOTH_DISABLE_CPU_FALLBACK") == "1":
        yield "there is no GPU, and UNSLOTH_DISABLE_CPU_FALLBACK=1 forbids unsloth to use the CPU"


def _unmet(package: str, version: str) -> Iterator[str]:
    """The requirements in the package's own metadata that the installed libraries do not meet."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    for text in metadata.requires(package) or []:
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        if name not in NEEDED or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        own = installed_version(name)
        broken = [str(bound) for bound in requirement.specifier if own and not bound.contains(own, prereleases=True)]
        if own is None:
            yield f"{package} {version} needs {name}, which is not installed"
        elif broken:
            yield f"{package} {version} wants {name} {', '.join(sorted(broken))}, and {own} is installed"


def installed_version(package: str) -> str | None:
    """Version of an installed package, from its metadata; None when it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
