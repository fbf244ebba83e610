"""What the doctor says of installed libraries: whether they go together, and what torch says when it is asked."""

from __future__ import annotations

import re
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from sftplay.machine.doctor.finding import Finding
from sftplay.machine.probe import Machine

RANGES = {
    "torch": ">=2.6,<2.15",
    "transformers": ">=5.10,<6",
    "trl": ">=1.14,!=1.15.0,<2",
    "peft": ">=0.19,<1",
    "accelerate": ">=1.12,<2",
    "datasets": ">=4.5,<6",
    "bitsandbytes": ">=0.49",
    "tensorboard": ">=2.18",
    "pydantic": ">=2.10,<3",
}
"""pyproject.toml's ranges, which are not at hand where the kit runs from a checkout."""

OPTIONAL = {"bitsandbytes": "4-bit weights (tuning.mode: qlora)", "tensorboard": "the TensorBoard tracker"}
"""Libraries without which something else still trains, and what does not."""

UNSLOTH_LIMITS = {"datasets": "<5", "transformers": "<5.18", "trl": "<1.16"}
"""unsloth 2026.10 refuses newer ones."""


def check_libraries(machine: Machine) -> list[Finding]:
    """Missing libraries, versions outside the tested ranges, combinations known not to work."""
    versions = machine.libraries
    found = [_missing(name) for name in RANGES if name not in versions]
    for name, version in versions.items():
        if name in RANGES and not is_within(version, RANGES[name]):
            what = f"{name} {version} is outside {RANGES[name]}, which this kit is made for"
            found.append(Finding("warn", "versions", what, "make install, for the versions tested together"))
    found += _known_bad(versions, has_gpu=bool(machine.gpus))
    return found or [Finding("ok", "versions", "all libraries are there and go together")]


def check_torch(answer: dict[str, Any], machine: Machine) -> list[Finding]:
    """What `ask_torch` brought: whether torch sees what the driver sees."""
    if "error" in answer:
        return [Finding("stop", "torch", f"cannot be imported: {answer['error']}", "make install")]
    n, seen = len(machine.gpus), answer["devices"]
    if n and not answer["is_available"]:
        fix = "look at the driver and torch lines of this list, or restart the machine"
        return [Finding("stop", "torch", "the driver shows GPUs, torch can use none", fix)]
    if n != seen:
        what = f"sees {seen} GPUs, the driver shows {n}"
        return [Finding("warn", "torch", what, "name them in CUDA_VISIBLE_DEVICES by UUID (`make gpu-info --json`)")]
    nccl = f", NCCL {answer['nccl']}" if "nccl" in answer else ""
    return [Finding("ok", "torch", f"imports, and sees {seen} GPUs{nccl}")]


def is_within(version: str, ranges: str) -> bool:
    """True when a release lies within `>=1.2,<2,!=1.15.0`; local and pre-release parts do not count."""
    own = _release(version)
    for part in ranges.split(","):
        sign, bound = re.fullmatch(r"(>=|<|!=)([\d.]+)", part.strip()).groups()  # type: ignore[union-attr]
        edge = _release(bound)
        if {">=": own < edge, "<": own >= edge, "!=": own == edge}[sign]:
            return False
    return True


def _release(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in found[0].split(".")] if found else [0]
    return tuple([*numbers, 0, 0, 0][:4])


def _missing(name: str) -> Finding:
    if name in OPTIONAL:
        return Finding("warn", "versions", f"{name} is not installed: no {OPTIONAL[name]}", "make install")
    return Finding("stop", "versions", f"{name} is not installed", "make install")


def _known_bad(versions: dict[str, str], *, has_gpu: bool) -> list[Finding]:
    found = []
    if versions.get("trl") == "1.15.0" and not has_gpu and find_spec("triton") is None:
        what = "trl 1.15.0 cannot train on a CPU without Triton: its loss head is missing there"
        found.append(Finding("stop", "versions", what, "make install, which takes another trl"))
    if find_spec("unsloth") is not None:
        for name, limit in UNSLOTH_LIMITS.items():
            if name in versions and not is_within(versions[name], limit):
                what = f"unsloth {_version('unsloth')} does not work with {name} {versions[name]}"
                found.append(
                    Finding("warn", "versions", what, f"pip install '{name}{limit}', or use tuning.backend: bnb")
                )
    return found


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
