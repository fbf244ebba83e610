"""Which devices CUDA will give a process, and in which order: CUDA_VISIBLE_DEVICES and MIG, read as CUDA reads them.

It works on names and asks no driver.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Present:
    """One GPU of the machine in PCI order. `instances` are its MIG instances' UUIDs, None while MIG is off."""

    uuid: str
    instances: tuple[str, ...] | None = None


Choice = tuple[int, int | None]
"""Place of a GPU, and of the instance on it where MIG is on."""


def choose(present: Sequence[Present], visible: str | None) -> tuple[list[Choice], str]:
    """The devices in CUDA's order, and the reason when there is none.

    `visible` is the value of CUDA_VISIBLE_DEVICES, None when it is not set. Only devices before the first one that does
    not exist count, and a device named twice leaves none (torch/cuda/__init__.py, _parse_visible_devices). A process
    sees one MIG instance at most, and then no whole GPU (NVIDIA MIG User Guide, CUDA Device Enumeration).
    """
    if visible is not None and visible.strip() in ("", "-1"):
        return [], "CUDA_VISIBLE_DEVICES hides every GPU"
    wanted = [part.strip() for part in visible.split(",")] if visible is not None else None
    found = _all(present) if wanted is None else _named(present, wanted)
    if len(set(found)) < len(found):
        return [], f"CUDA_VISIBLE_DEVICES={visible} names a GPU twice, then CUDA gives none"
    instances = [choice for choice in found if choice[1] is not None]
    chosen = instances[:1] or found
    if chosen:
        return chosen, ""
    if visible is not None:
        return [], f"CUDA_VISIBLE_DEVICES={visible} names no GPU of this machine"
    if any(gpu.instances is not None for gpu in present):
        return [], "MIG is on and no instance is made: `nvidia-smi mig -cgi PROFILE -C` makes one"
    return [], "the driver sees no GPU"


def _all(present: Sequence[Present]) -> list[Choice]:
    found: list[Choice] = []
    for place, gpu in enumerate(present):
        found += [(place, None)] if gpu.instances is None else [(place, n) for n in range(len(gpu.instances))]
    return found


def _named(present: Sequence[Present], wanted: list[str]) -> list[Choice]:
    found: list[Choice] = []
    for part in wanted:
        choice = _find_instance(present, part) if part.startswith("MIG-") else _find_gpu(present, part)
        if choice is None:
            break  # CUDA itself ignores everything behind the first device that does not exist
        found.append(choice)
    return found


def _find_gpu(present: Sequence[Present], part: str) -> Choice | None:
    places = (
        [int(part)] if part.isdigit() else [n for n, gpu in enumerate(present) if part and gpu.uuid.startswith(part)]
    )
    if len(places) != 1 or places[0] >= len(present):
        return None
    instances = present[places[0]].instances
    if instances is None:
        return places[0], None
    return (places[0], 0) if instances else None


def _find_instance(present: Sequence[Present], part: str) -> Choice | None:
    matches = [
        (place, n)
        for place, gpu in enumerate(present)
        for n, uuid in enumerate(gpu.instances or ())
        if uuid.startswith(part)
    ]
    return matches[0] if len(matches) == 1 else None
