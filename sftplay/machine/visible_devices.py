"""Which devices CUDA gives a process, and in which order: CUDA_VISIBLE_DEVICES and MIG, read as CUDA reads them.

It works on names and does not ask the driver.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Present:
    """One GPU of the machine, in PCI order. `instances` are the UUIDs of its MIG instances; None while MIG is off."""

    uuid: str
    instances: tuple[str, ...] | None = None


Choice = tuple[int, int | None]
"""Index of a GPU, and of the MIG instance on it; None for a whole GPU."""


def choose(present: Sequence[Present], visible: str | None) -> tuple[list[Choice], str]:
    """The devices in CUDA's order, and the reason when there is none.

    `visible` is the value of CUDA_VISIBLE_DEVICES; None when it is not set. Devices after the first one that does not
    exist do not count, and a device named twice leaves none (torch/cuda/__init__.py, _parse_visible_devices). A process
    sees one MIG instance at most, and then it sees no whole GPU (NVIDIA MIG User Guide, CUDA Device Enumeration).
    """
    if visible is not None and visible.strip() in ("", "-1"):
        return [], "CUDA_VISIBLE_DEVICES hides every GPU"
    choices = _all(present) if visible is None else _named(present, visible)
    if len(set(choices)) < len(choices):
        return [], f"CUDA_VISIBLE_DEVICES={visible} names a GPU twice, then CUDA gives none"
    instances = [choice for choice in choices if choice[1] is not None]
    chosen = instances[:1] or choices
    if chosen:
        return chosen, ""
    if visible is not None:
        return [], f"CUDA_VISIBLE_DEVICES={visible} names no GPU of this machine"
    if any(gpu.instances is not None for gpu in present):
        return [], "MIG is on, and there is no instance: `nvidia-smi mig -cgi PROFILE -C` makes one"
    return [], "the driver sees no GPU"


def _all(present: Sequence[Present]) -> list[Choice]:
    choices: list[Choice] = []
    for index, gpu in enumerate(present):
        choices += [(index, None)] if gpu.instances is None else [(index, n) for n in range(len(gpu.instances))]
    return choices


def _named(present: Sequence[Present], visible: str) -> list[Choice]:
    choices: list[Choice] = []
    for name in map(str.strip, visible.split(",")):
        choice = _find_instance(present, name) if name.startswith("MIG-") else _find_gpu(present, name)
        if choice is None:
            break  # CUDA itself ignores everything after the first device that does not exist
        choices.append(choice)
    return choices


def _find_gpu(present: Sequence[Present], name: str) -> Choice | None:
    indices = (
        [int(name)] if name.isdigit() else [n for n, gpu in enumerate(present) if name and gpu.uuid.startswith(name)]
    )
    if len(indices) != 1 or indices[0] >= len(present):
        return None
    instances = present[indices[0]].instances
    if instances is None:
        return indices[0], None
    return (indices[0], 0) if instances else None


def _find_instance(present: Sequence[Present], name: str) -> Choice | None:
    matches = [
        (index, n)
        for index, gpu in enumerate(present)
        for n, uuid in enumerate(gpu.instances or ())
        if uuid.startswith(name)
    ]
    return matches[0] if len(matches) == 1 else None
