"""Kinds of GPUs by name, for plans of machines that are not here, and the names of the devices of a run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sftplay.errors import ConfigError, nearest_names

MIB = 2**20


@dataclass(frozen=True)
class Card:
    """One kind of GPU."""

    name: str
    total_mib: int
    capability: tuple[int, int]
    tflops: float  # peak dense 16-bit tensor throughput, in 10**12 operations a second

    @property
    def total_bytes(self) -> int:
        return self.total_mib * MIB


CARDS = (
    Card("T4", 15_360, (7, 5), 65),
    Card("P100", 16_384, (6, 0), 21),
    Card("V100", 16_384, (7, 0), 125),
    Card("V100-32GB", 32_768, (7, 0), 125),
    Card("A10", 23_028, (8, 6), 125),
    Card("A10G", 23_028, (8, 6), 125),
    Card("A30", 24_576, (8, 0), 165),
    Card("A40", 46_068, (8, 6), 150),
    Card("A100-40GB", 40_960, (8, 0), 312),
    Card("A100-80GB", 81_920, (8, 0), 312),
    Card("L4", 23_034, (8, 9), 121),
    Card("L40", 46_068, (8, 9), 181),
    Card("L40S", 46_068, (8, 9), 362),
    Card("H100", 81_559, (9, 0), 989),
    Card("H100-NVL", 95_830, (9, 0), 835),
    Card("H200", 143_771, (9, 0), 989),
    Card("GH200", 97_871, (9, 0), 989),
    Card("B200", 183_359, (10, 0), 2_250),
    Card("RTX-2080-Ti", 11_264, (7, 5), 108),
    Card("RTX-3060", 12_288, (8, 6), 51),
    Card("RTX-3080", 10_240, (8, 6), 119),
    Card("RTX-3090", 24_576, (8, 6), 142),
    Card("RTX-4060", 8_188, (8, 9), 60),
    Card("RTX-4060-Ti", 16_380, (8, 9), 88),
    Card("RTX-4070", 12_282, (8, 9), 117),
    Card("RTX-4080", 16_376, (8, 9), 195),
    Card("RTX-4090", 24_564, (8, 9), 330),
    Card("RTX-5090", 32_607, (12, 0), 419),
    Card("RTX-A6000", 49_140, (8, 6), 155),
    Card("RTX-6000-Ada", 49_140, (8, 9), 364),
    Card("RTX-PRO-6000", 97_887, (12, 0), 504),
)

DEFAULTS = {"A100": "A100-80GB", "V100-16GB": "V100", "H100-80GB": "H100", "4090": "RTX-4090", "3090": "RTX-3090"}
"""What a name without a size, or another usual spelling, stands for."""


def find_card(name: str) -> Card | None:
    """Find the card that `name` means, in any usual spelling, such as `NVIDIA A100-SXM4-80GB`; None when none does."""
    wanted = _plain(name)
    by_name = {_plain(card.name): card for card in CARDS}
    aliases = {_plain(alias): by_name[_plain(target)] for alias, target in DEFAULTS.items()}
    stripped = re.sub(r"NVIDIA|TESLA|GEFORCE|SXM\d?|PCIE|HBM\dE?|GENERATION|LAPTOPGPU", "", wanted)
    # `A10080GB` carries a size that the plain name may leave out.
    spellings = (wanted, stripped, re.sub(r"\d+GI?B$", "", stripped))
    known = by_name | aliases
    return next((known[spelling] for spelling in spellings if spelling in known), None)


def parse_fleet(text: str, where: str) -> tuple[int, Card]:
    """Parse `2xH200` or `H200`: a number of cards, and the card.

    Raises:
        ConfigError: no such card; near ones are named.
    """
    match = re.fullmatch(r"(?:(\d+)\s*[xX*]\s*)?(.+)", text.strip())
    count, name = (int(match[1] or 1), match[2]) if match else (1, text)
    card = find_card(name)
    if count < 1 or card is None:
        near = nearest_names(name, [known.name for known in CARDS])
        meant = f"did you mean {' or '.join(near)}? else " if near else ""
        fix = f"{meant}write a number and a card, such as 2xH200, or its memory with VRAM=24GiB"
        raise ConfigError(f"no card called {text!r} is known", where=where, fix=fix)
    return count, card


def _plain(name: str) -> str:
    return re.sub(r"[^A-Z0-9]", "", name.upper())


OWN = "own"  # the device that a process has anyway: its GPU, or the CPU where there is none


def name_devices(devices: Mapping[str, Any], *, is_gpu: bool) -> dict[str, Any]:
    """Return the same by the usual names: a process's own device is its first GPU, or the CPU."""
    here = "cuda:0" if is_gpu else "cpu"
    return {here if name == OWN else name: value for name, value in devices.items()}
