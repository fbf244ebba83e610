"""The time that a run has taken over all its attempts, and its cost by the price of a GPU for an hour."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sftplay.config.run import RunConfig
    from sftplay.launch.run_folder import RunFolder

HOUR_S = 3600.0


def compute_cost(seconds: float, *, gpus: int, price_per_hour: float) -> float:
    """Return the cost of so many seconds. Without a GPU the price is that of the machine."""
    return seconds / HOUR_S * max(1, gpus) * price_per_hour


def format_cost(cost: float) -> str:
    """`1,234.50`, `0.0123`: two digits behind the point, and more of what is below a tenth."""
    return f"{cost:,.2f}" if cost >= 0.1 or cost == 0 else f"{cost:.3g}"


def count_gpus(cfg: RunConfig, *, world_size: int, has_gpu: bool, devices: Collection[str] = ()) -> int:
    """Return how many GPUs a run holds: one a process, or those in `devices` of a process that takes several, and those
    of its generation server; 0 on CPUs.
    """
    held = max(world_size, sum(name != "cpu" for name in devices))
    if has_gpu and cfg.grpo.generation == "vllm_server":
        from sftplay.launch.generation_server import starts_server

        held += cfg.grpo.vllm.tensor_parallel if starts_server(cfg) else 0
    return held if has_gpu else 0


def new_attempt(cfg: RunConfig, folder: RunFolder, *, from_step: int, gpus: int) -> dict[str, Any]:
    """Return the record of an attempt in status.json. It began when the run's command started its workers."""
    started = read_number(folder.read_json("status.json").get("started"))
    price = cfg.cluster.price_per_hour
    return {
        "from_step": from_step, "to_step": None, "cause": None, "started": started or round(time.time(), 3),
        "gpus": gpus, **({} if price is None else {"price_per_hour": price}),
    }  # fmt: skip


def last_write_s(run: Path) -> float:
    """Return when a run's status.json or metrics.jsonl was last written, in seconds of the epoch; 0 without both."""
    times = [0.0]
    for name in ("status.json", "metrics.jsonl"):
        with suppress(OSError):
            times.append((run / name).stat().st_mtime)
    return max(times)


def with_ends(attempts: Sequence[dict[str, Any]], *, end_s: float) -> list[dict[str, Any]]:
    """Return the attempts with the seconds of those that were killed, which cannot have written any: until `end_s`."""

    def end(attempt: dict[str, Any]) -> dict[str, Any]:
        started = read_number(attempt.get("started"))
        is_open = started is not None and read_number(attempt.get("seconds")) is None
        return {**attempt, "seconds": round(max(0.0, end_s - started), 3)} if is_open and started else attempt

    return [end(attempt) for attempt in attempts]


def sum_attempts(attempts: Sequence[Mapping[str, Any]]) -> tuple[float | None, float | None]:
    """Return seconds and cost of all attempts that have begun; the cost is None where one of them has no price.

    Both are None without an attempt, and where the time of one is not known.
    """
    if not attempts:
        return None, None
    total, costs = 0.0, list[float]()
    for attempt in attempts:
        seconds, gpus, price = (read_number(attempt.get(key)) for key in ("seconds", "gpus", "price_per_hour"))
        if seconds is None:
            return None, None
        total += seconds
        if price is not None and gpus is not None:
            costs.append(compute_cost(seconds, gpus=int(gpus), price_per_hour=price))
    return total, sum(costs) if len(costs) == len(attempts) else None


def read_number(value: object) -> float | None:
    """Return a size or a time as a float; None for anything else, which a broken file may hold."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value < 2**60 else None  # type: ignore[operator, arg-type]
