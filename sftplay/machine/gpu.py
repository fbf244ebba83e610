"""Facts about one GPU, or about one MIG instance of a GPU. None: the card or the driver does not say."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GpuProcess:
    """A process that holds memory of a GPU, as the driver sees it: in a container its pid may be the host's."""

    pid: int
    name: str
    used_bytes: int | None


@dataclass(frozen=True)
class Gpu:
    """One device, numbered as CUDA numbers it. Details are None unless they were asked for."""

    index: int
    name: str
    total_bytes: int
    free_bytes: int
    capability: tuple[int, int]
    used_bytes: int = 0
    uuid: str = ""
    bus_id: str = ""
    machine_index: int = 0
    """Its number among all GPUs of the machine in the order of the PCI bus, as nvidia-smi counts them."""
    is_mig: bool = False
    """True for an instance of a GPU: memory is the instance's, temperature and power are the whole GPU's."""
    temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    busy_percent: int | None = None
    memory_errors: int | None = None
    """Uncorrected ECC errors since the driver was loaded."""
    needs_reset: bool | None = None
    """Memory rows wait for a reset to be replaced."""
    is_failing: bool | None = None
    """Memory rows could not be replaced: the card must be exchanged."""
    compute_mode: int | None = None
    """NVML's NVML_COMPUTEMODE_*: 0 shared, 2 prohibited, 3 one process."""
    processes: tuple[GpuProcess, ...] = ()

    @property
    def has_bf16(self) -> bool:
        """bf16 arithmetic in hardware: compute capability 8.0 (Ampere) and later."""
        return self.capability >= (8, 0)

    @property
    def plannable_bytes(self) -> int:
        """Memory that a run may count on: all but what others hold and what the driver keeps."""
        return min(self.total_bytes, self.free_bytes)


@dataclass(frozen=True)
class MigInstance:
    """A slice of a GPU. `CUDA_VISIBLE_DEVICES=<uuid>` selects it; a process gets one at most."""

    uuid: str
    name: str
    machine_index: int
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class GpuReading:
    """Everything that the driver said at one moment."""

    gpus: tuple[Gpu, ...] = ()
    reason: str = ""
    """Why `gpus` is empty."""
    driver: str = ""
    cuda: tuple[int, int] | None = None
    """The newest CUDA that the driver runs."""
    links: tuple[tuple[str, ...], ...] = ()
    """How the visible GPUs are linked, a square matrix in nvidia-smi's terms: NV12, PIX, PXB, PHB, NODE, SYS."""
    without_peer_access: tuple[tuple[int, int], ...] = ()
    """Pairs of visible GPUs that cannot read each other's memory."""
    instances: tuple[MigInstance, ...] = ()
    """Every MIG instance of the machine, visible or not."""
    notes: tuple[str, ...] = ()
