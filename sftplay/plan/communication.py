"""What all-reduces of gradients take: nominal speeds of links, and times between measured sizes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sftplay.machine.gpu import Machine

NVLINK_BYTES_PER_S = {6: 20e9, 7: 25e9, 8: 25e9, 9: 25e9, 10: 50e9}
"""Compute capability's first number -> bytes a second that one NVLink carries each way. Sources: NVIDIA's papers on
the architectures Pascal to Blackwell (a V100 has 6 links and 300 GB/s both ways, an H100 18 and 900, a B200 18 and
1800)."""

SLOWER_NVLINK = (8, 6)  # capability of cards with slower links, which are left out

SIZES_BYTES = tuple(2**power for power in range(12, 27, 2))
"""Exchanges that a check of the communication measures: 4 KiB to 64 MiB, by fours."""

BUCKET_BYTES = 25 * 2**20
"""What DDP sends at a time where `cluster.comm.bucket_cap_mb` says nothing (torch 2.13, `DistributedDataParallel`)."""


@dataclass(frozen=True)
class Exchange:
    """One all-reduce of a size: how long its slowest rank took."""

    size_bytes: int
    latency_s: float

    def algorithm_bytes_per_s(self) -> float:
        """What a rank gives in, over the time until it has the sum."""
        return self.size_bytes / self.latency_s

    def bus_bytes_per_s(self, ranks: int) -> float:
        """What each rank's link carries each way: a ring sends every byte 2 (n - 1) / n times. Source: the notes on
        performance of NCCL's own tests."""
        return self.algorithm_bytes_per_s() * 2 * (ranks - 1) / ranks

    def as_dict(self, ranks: int) -> dict[str, float]:
        rates = {"algorithm_bytes_per_s": self.algorithm_bytes_per_s(), "bus_bytes_per_s": self.bus_bytes_per_s(ranks)}
        return {**asdict(self), **rates}


def nominal_link(machine: Machine, nproc: int, *, nnodes: int) -> tuple[float | None, str]:
    """Return the slowest link between the first `nproc` GPUs, in bytes a second each way; None and why if not known."""
    if nnodes > 1:
        return None, "the network between the nodes: its nominal speed is not known here"
    if not machine.gpus:
        return None, "loopback, which is this machine's memory: it has no nominal speed"
    kinds = {kind for i, row in enumerate(machine.links[:nproc]) for kind in row[i + 1 : nproc]}
    if not kinds:
        return None, "the driver does not say how the GPUs are joined"
    counts = [int(kind[2:]) for kind in kinds if kind.startswith("NV") and kind[2:].isdigit()]
    capability = machine.gpus[0].capability
    speed = None if capability == SLOWER_NVLINK else NVLINK_BYTES_PER_S.get(capability[0])
    if len(counts) < len(kinds) or speed is None:
        return None, f"{', '.join(sorted(kinds))}: its nominal speed is not known here"
    return min(counts) * speed, f"NVLink, {min(counts)} links of {speed / 1e9:g} GB/s each way"


def turning_bytes(sweep: Sequence[Exchange]) -> int:
    """Return the size whose exchange takes as long to start as to send: the smallest size's time, at the best speed."""
    return round(sweep[0].latency_s * max(exchange.algorithm_bytes_per_s() for exchange in sweep))


def exchange_s(sweep: Sequence[Exchange], total_bytes: float, *, bucket_bytes: float) -> float:
    """Return the seconds that `total_bytes` take in buckets, one after the other.

    `sweep` has ascending sizes; between them the time is taken from a straight line.
    """
    whole, rest = divmod(total_bytes, bucket_bytes)
    return whole * _latency_s(sweep, bucket_bytes) + (_latency_s(sweep, rest) if rest else 0.0)


def _latency_s(sweep: Sequence[Exchange], size_bytes: float) -> float:
    above = bisect_left(sweep, size_bytes, key=lambda exchange: exchange.size_bytes)
    if above == 0:
        return sweep[0].latency_s
    if above == len(sweep):
        return sweep[-1].latency_s * size_bytes / sweep[-1].size_bytes
    low, high = sweep[above - 1], sweep[above]
    part = (size_bytes - low.size_bytes) / (high.size_bytes - low.size_bytes)
    return low.latency_s + part * (high.latency_s - low.latency_s)
