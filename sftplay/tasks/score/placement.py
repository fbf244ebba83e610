"""Which device holds which model of task score."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError, MachineError
from sftplay.plan.devices import OWN

Placed = Literal["shared", "roles", "roles4", "sharded"]

PLACEMENT, DEVICES, STRATEGY = "score.placement", "score.devices", "cluster.strategy"


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
