"""Kinds of GPUs by name, for plans of machines that are not here, and which device holds which part of a run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError, MachineError, nearest_names

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


Placed = Literal["shared", "roles", "roles4", "sharded"]

PLACEMENT, DEVICES, STRATEGY = "score.placement", "score.devices", "cluster.strategy"

OWN = "own"  # the device that a process has anyway: its GPU, or the CPU where there is none


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A device for each part: `own`, `cpu` or `cuda:N`."""

    placement: Placed
    solver: str = OWN
    guide: str = OWN
    value: str = OWN
    critic: str = OWN
    target_critic: str = OWN
    ref: str = OWN

    @property
    def separates(self) -> bool:
        """True where the guide is a model of its own and no adapter on the solver's base."""
        return self.placement != "shared"

    @property
    def is_split(self) -> bool:
        """True where every process holds a part of each weight."""
        return self.placement == "sharded"

    def devices(self) -> dict[str, str]:
        """Part -> device."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "placement"}

    def as_torch(self, here: str) -> dict[str, str]:
        """The same in torch's names; `here` is that of the process's device."""
        return {part: here if device == OWN else device for part, device in self.devices().items()}


def resolve_layout(cfg: RunConfig, *, placement: Placed, gpus: int, processes: int) -> Layout:
    """Find the layout of `placement` with what `score.devices` says, on a machine with so many visible GPUs.

    Raises:
        ConfigError: the devices contradict the placement or the number of processes.
        MachineError: the machine has too few GPUs.
    """
    if placement == "sharded" and processes == 1:
        by_strategy = cfg.score.placement == "auto" and cfg.cluster.strategy == "fsdp"
        others = [] if by_strategy else [f"{PLACEMENT}: roles or shared"]
        others += [f"{STRATEGY}: ddp"] if cfg.cluster.strategy == "fsdp" else []
        what = f"{'fsdp' if by_strategy else 'sharded'}: each process holds a part of each model, and one is started"
        fix = f"start several (NPROC=2, `make train-distributed`), or write {' and '.join(others)}"
        raise ConfigError(what, where=_where(cfg, STRATEGY if by_strategy else PLACEMENT), fix=fix)
    # Of a config that says fp16 itself the rules know. This is what `auto` became.
    if placement == "sharded" and cfg.train.precision == "fp16":
        what = "sharded: the scaler of fp16 looks for numbers that are not finite on each process alone"
        fix = "write train.precision: fp32; bf16 needs a GPU from 2020 on"
        raise ConfigError(what, where=_where(cfg, "train.precision"), fix=fix)
    if placement not in ("sharded", "shared") and processes > 1:
        what = f"{placement}: one process holds all parts, and {processes} are started"
        fix = f"start one process (NPROC=1, `make train`), or write {PLACEMENT}: shared"
        raise ConfigError(what, where=_where(cfg, PLACEMENT), fix=fix)
    named = {part: device for part, device in dict(cfg.score.devices).items() if device != "auto"}
    for part, device in named.items():
        _refuse_device(cfg, part, device=device, gpus=gpus, processes=processes)
    devices: dict[str, str] = {}
    if placement == "roles" and gpus:
        devices = dict.fromkeys(("guide", "value", "target_critic", "ref"), "cuda:1")
    elif placement == "roles4" and gpus:
        devices = {"critic": "cuda:1", "guide": "cuda:2", "value": "cuda:3", "target_critic": "cpu", "ref": "cpu"}
    if placement == "roles" and "guide" in named:  # these follow the guide
        devices |= dict.fromkeys(("value", "target_critic", "ref"), named["guide"])
    here = "cuda:0" if gpus else "cpu"
    devices |= {part: OWN if device == here else device for part, device in named.items()}
    layout = Layout(placement=placement, **devices)
    for part, device in layout.devices().items():
        if device.startswith("cuda:") and gpu_number(device) >= gpus:
            what = f"{placement} lays the {part} on {device}, and this machine shows {gpus} GPU{'s' * (gpus > 1)}"
            fix = f"write {PLACEMENT}: {'roles' if gpus > 1 else 'shared'}, or {DEVICES}: {{{part}: cpu}}"
            raise MachineError(what, where=_where(cfg, PLACEMENT), fix=fix)
    return layout


def uses_several_gpus(cfg: RunConfig) -> bool:
    """Return whether one process may use a second GPU; `score.placement` may be undecided."""
    named = (str(device) for device in dict(cfg.score.devices).values())
    is_placed = cfg.score.placement not in ("shared", "sharded") or any(device.startswith("cuda:") for device in named)
    return cfg.task.turns == 2 and is_placed


def gpu_number(device: str) -> int:
    """Return the number of a GPU; the process's own is the first."""
    return int(device.removeprefix("cuda:")) if device.startswith("cuda:") else 0


def _refuse_device(cfg: RunConfig, part: str, *, device: str, gpus: int, processes: int) -> None:
    key = f"{DEVICES}.{part}"
    where, auto = _where(cfg, key), f"write {key}: auto"
    if device != "cpu" and processes > 1:
        what = f"{processes} processes are started, and every one of them would lay its {part} on this one GPU"
        fix = f"{auto}, which is each process's own GPU, or start one process (NPROC=1)"
        raise ConfigError(f"{device}: {what}", where=where, fix=fix)
    if device != "cpu" and gpu_number(device) >= gpus:
        shown = ", ".join(f"cuda:{n}" for n in range(gpus)) or "none"
        fix = f"{auto}{', cpu' if part != 'solver' else ''}{f' or cuda:{gpus - 1}' if gpus else ''}"
        raise MachineError(f"{device}: this machine shows {gpus} GPUs ({shown})", where=where, fix=fix)
    if part == "solver" and device != ("cuda:0" if gpus else "cpu"):
        what = f"{device}: the solver lies on the process's own device, which is the first visible GPU"
        fix = f"{auto}, and choose the first GPU with CUDA_VISIBLE_DEVICES, such as 1,0"
        raise ConfigError(what, where=where, fix=fix)


def _where(cfg: RunConfig, key: str) -> str:
    return f"{cfg.origins.get(key, 'score')} {key}"


def name_devices(devices: Mapping[str, Any], *, is_gpu: bool) -> dict[str, Any]:
    """Return the same by the usual names: a process's own device is its first GPU, or the CPU."""
    here = "cuda:0" if is_gpu else "cpu"
    return {here if name == OWN else name: value for name, value in devices.items()}
