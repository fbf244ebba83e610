"""The doctor's findings about installed libraries: whether they fit together, and what torch itself reports."""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import Any

from sftplay.machine.doctor.check_result import CheckResult, Level
from sftplay.machine.libraries import compiler_remedy, find_compiler_problem, installed_version
from sftplay.machine.probe import Machine

RANGES = {
    "torch": ">=2.6,<2.15",
    "transformers": ">=5.10,<6",
    "trl": ">=1.14,!=1.15.0,<1.18",
    "peft": ">=0.19,<1",
    "accelerate": ">=1.12,<2",
    "datasets": ">=4.5,<6",
    "bitsandbytes": ">=0.49",
    "tensorboard": ">=2.18",
    "pydantic": ">=2.10,<3",
}
"""The ranges of pyproject.toml. They cannot be read from metadata where the kit runs from a checkout."""

OPTIONAL = {"bitsandbytes": "4-bit weights (tuning.mode: qlora)", "tensorboard": "the TensorBoard tracker"}
"""Libraries that only some runs need, and what needs them."""

UNSLOTH_LIMITS = {"datasets": "<5", "transformers": "<5.18", "trl": "<1.16"}  # unsloth 2026.10 refuses newer versions


def check_libraries(machine: Machine) -> list[CheckResult]:
    """Missing libraries, versions outside the tested ranges, and combinations that are known not to work."""
    versions, results = machine.libraries, []
    for name in RANGES:
        if name not in versions:
            level: Level = "warn" if name in OPTIONAL else "stop"
            need = f": no {OPTIONAL[name]}" if name in OPTIONAL else ""
            results.append(CheckResult(level, "versions", f"{name} is not installed{need}", "make install"))
    for name, version in versions.items():
        if name in RANGES and not is_within(version, RANGES[name]):
            what = f"{name} {version} is outside {RANGES[name]}, which this kit is made for"
            results.append(CheckResult("warn", "versions", what, "make install, for the versions tested together"))
    if versions.get("trl") == "1.15.0" and not machine.gpus and find_spec("triton") is None:
        what = "trl 1.15.0 cannot train on a CPU without Triton: its loss head is missing there"
        results.append(CheckResult("stop", "versions", what, "make install, which takes another trl"))
    for name, limit in UNSLOTH_LIMITS.items() if find_spec("unsloth") is not None else ():
        if name in versions and not is_within(versions[name], limit):
            what = f"unsloth {installed_version('unsloth')} does not work with {name} {versions[name]}"
            fix = f"pip install '{name}{limit}', or use tuning.backend: bnb"
            results.append(CheckResult("warn", "versions", what, fix))
    return results or [CheckResult("ok", "versions", "all libraries are installed and fit together")]


def check_torch(answer: dict[str, Any], machine: Machine) -> list[CheckResult]:
    """Findings from the answer of `ask_torch`: whether torch sees the GPUs that the driver shows."""
    if "error" in answer:
        return [CheckResult("stop", "torch", f"cannot be imported: {answer['error']}", "make install")]
    n_driver, n_torch = len(machine.gpus), answer["devices"]
    if n_driver and not answer["is_available"]:
        fix = "see the driver and torch lines of this list, or restart the machine"
        return [CheckResult("stop", "torch", "the driver shows GPUs, torch can use none", fix)]
    if n_driver != n_torch:
        what = f"sees {n_torch} GPUs, the driver shows {n_driver}"
        fix = "name them in CUDA_VISIBLE_DEVICES by UUID (`make gpu-info --json`)"
        return [CheckResult("warn", "torch", what, fix)]
    nccl = f", NCCL {answer['nccl']}" if "nccl" in answer else ""
    return [CheckResult("ok", "torch", f"can be imported, and sees {n_torch} GPUs{nccl}")]


def check_compiler(machine: Machine) -> list[CheckResult]:
    """Whether Triton can build kernels on a machine with GPUs: Liger, torch.compile and TRL's GRPO use them."""
    if not machine.gpus:
        return []
    if problem := find_compiler_problem():
        what = f"{problem}: Liger and torch.compile cannot build kernels, and GRPO does without TRL's"
        return [CheckResult("warn", "compiler", what, compiler_remedy())]
    return [CheckResult("ok", "compiler", "Triton can build kernels")]


def is_within(version: str, ranges: str) -> bool:
    """True when a release lies within `>=1.2,<2,!=1.15.0`; local and pre-release parts do not count."""
    release = _release(version)
    for part in ranges.split(","):
        sign, bound = re.fullmatch(r"(>=|<|!=)([\d.]+)", part.strip()).groups()  # type: ignore[union-attr]
        limit = _release(bound)
        if {">=": release < limit, "<": release >= limit, "!=": release == limit}[sign]:
            return False
    return True


def _release(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in match[0].split(".")] if match else [0]
    return tuple([*numbers, 0, 0, 0][:4])
