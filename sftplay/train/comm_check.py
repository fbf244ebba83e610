"""One rank of a check of the communication: all-reduces of growing sizes over the group a run would use.

`runs.comm_check` starts the launcher that starts it, and reads what it leaves. It knows nothing of a run.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sftplay import log
from sftplay.atomic import write_text
from sftplay.errors import RunError, SftplayError
from sftplay.plan.communication import BUCKET_BYTES, SIZES_BYTES
from sftplay.signals import die_with_parent

WARM_UP = 2
CYCLE = 251
"""Elements of a rank's buffer count up to this and start again. So a shifted sum is noticed, and all sums are exact."""

Reduce = Callable[[Tensor], Any]


def main(folder: str, limit_s: str) -> int:
    """Measure, and leave what this rank knows in `folder`/rankN.json; 0, or an error's exit code."""
    die_with_parent()

    def leave(**known: Any) -> None:  # a reader finds the old note or the new one
        write_text(Path(folder) / f"rank{log.rank()}.json", json.dumps(known))

    leave(state="started")
    device = take_device()
    try:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=float(limit_s)))
        leave(state="met")
        measured, everyone = sweep(device, dist.all_reduce), list[Any]([None] * log.world_size())
        dist.all_gather_object(everyone, measured)
        # Every figure is that of the slowest rank, the same on all ranks.
        latencies = [max(ranks) for ranks in zip(*(rank["latencies_s"] for rank in everyone), strict=True)]
        slowest = {key: max(rank[key] for rank in everyone) for key in ("plain_s", "fp16_s")}
        slowest |= {"device": measured["device"], "backend": dist.get_backend()}
        leave(state="done", latencies_s=latencies, **slowest)
    except SftplayError as error:
        leave(state="failed", error=error.what)
        return error.exit_code
    except RuntimeError as error:  # a rank has ended, or never came
        leave(state="failed", error=str(error).splitlines()[0])
        return RunError.exit_code
    dist.destroy_process_group()
    return 0


def take_device() -> torch.device:
    """Take this rank's GPU, or the CPU where accelerate keeps to it."""
    if not torch.cuda.is_available() or os.environ.get("ACCELERATE_USE_CPU") == "true":
        return torch.device("cpu")
    device = torch.device("cuda", log.local_rank())
    torch.cuda.set_device(log.local_rank())
    return device


def sweep(device: torch.device, reduce: Reduce) -> dict[str, Any]:
    """Return this rank's median seconds of an all-reduce of each size, and of one bucket with and without fp16's hook.
    Raise RunError where a sum is wrong.
    """
    latencies = []
    for size_bytes in SIZES_BYTES:
        check_sum(size_bytes, device, reduce=reduce)
        buffer = torch.zeros(size_bytes // 4, device=device)
        latencies.append(median_s(partial(reduce, buffer), device, size_bytes=size_bytes))
    bucket = torch.zeros(BUCKET_BYTES // 4, device=device)

    def reduce_as_fp16() -> None:  # as torch's fp16_compress_hook does
        half = bucket.to(torch.float16).div_(log.world_size())
        reduce(half)
        bucket.copy_(half)

    plain_s = median_s(lambda: reduce(bucket.div_(log.world_size())), device, size_bytes=BUCKET_BYTES)
    fp16_s = median_s(reduce_as_fp16, device, size_bytes=BUCKET_BYTES)
    return {"latencies_s": latencies, "plain_s": plain_s, "fp16_s": fp16_s, "device": device.type}


def check_sum(size_bytes: int, device: torch.device, *, reduce: Reduce) -> None:
    """Exchange fp32 numbers whose sum every rank knows. Raise RunError where it is not exactly that."""
    numbers = torch.arange(size_bytes // 4, device=device, dtype=torch.float32) % CYCLE
    buffer = numbers * (log.rank() + 1)
    reduce(buffer)
    ranks = log.world_size()
    wrong = int((buffer != numbers * (ranks * (ranks + 1) // 2)).sum())
    if wrong:
        raise RunError(f"holds a wrong sum after an all-reduce of {size_bytes} bytes: {wrong} of {len(buffer)} numbers")


def median_s(exchange: Callable[[], Any], device: torch.device, *, size_bytes: int) -> float:
    """Return the median seconds of `exchange`, the device's own work included, after a warm-up."""
    taken, wait = [], partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    for n in range(WARM_UP + (25 if size_bytes <= 2**20 else 7)):  # large sizes take long and vary little
        wait()
        start = time.perf_counter()
        exchange()
        wait()
        if n >= WARM_UP:
            taken.append(time.perf_counter() - start)
    return statistics.median(taken)


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
