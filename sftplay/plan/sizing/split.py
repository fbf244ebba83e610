"""One step's rows in micro-batches: as large as fits the device and helps, and exactly the effective batch in all."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from sftplay.config.run import RunConfig
from sftplay.config.section import find_spec
from sftplay.errors import ConfigError
from sftplay.plan.memory.forecast import Forecast, Hardware, forecast
from sftplay.plan.memory.probe_fit import Fit
from sftplay.plan.memory.row_lengths import planned_tokens
from sftplay.plan.memory.step import Size
from sftplay.plan.shape.model_shape import ModelShape
from sftplay.plan.sizing.placement import planned_strategy
from sftplay.plan.sizing.task_sizing import setting_of
from sftplay.units import format_bytes

TOKENS_PER_MICRO_BATCH = {"gpu": 16_384, "cpu": 1_024}
"""Tokens of an automatic micro-batch where memory is not planned. A GPU needs them to be busy. A CPU is busy with one
row, and small micro-batches of rows of like length carry less padding (measured in docs/benchmarks.md)."""

PLATEAU_TOKENS = 65_536
"""Most tokens of a GPU's micro-batch where memory is planned. Matrices of that many rows keep any card busy (a product
becomes bound by arithmetic at some hundred rows); more would only fill memory."""


class Split(NamedTuple):
    """Rows of a micro-batch, micro-batches of a step, and why."""

    rows: int
    accum: int
    reason: str


def foresight(
    cfg: RunConfig, shape: ModelShape, *, hardware: Hardware, fit: Fit | None = None, sampled: int = 1
) -> Callable[[int], Forecast]:
    """The forecast of a micro-batch of so many rows, for a config in which all but the sizes is decided.

    `sampled` completions are sampled at a time.
    """
    setting = setting_of(cfg, shape, hardware=hardware, strategy=planned_strategy(cfg, hardware.world_size), fit=fit)
    share = cfg.train.effective_batch_size // hardware.world_size
    tokens = planned_tokens(cfg, hardware.lengths)
    return lambda rows: forecast(setting, Size(rows=rows, seq=tokens, accumulates=rows < share), sampled=sampled)


def split_batch(
    cfg: RunConfig,
    world_size: int,
    *,
    has_gpu: bool,
    row_tokens: int | None = None,
    most_tokens: int | None = None,
    look: Callable[[int], Forecast] | None = None,
) -> Split:
    """Micro-batch and accumulation whose product over all processes is exactly the effective batch.

    `row_tokens` is the length of the longest row, None for rows of full length; `most_tokens` the most tokens of an
    automatic micro-batch, None for what suits rows of text.
    With `look`, which forecasts a micro-batch, an automatic one is the largest that fits the device and still helps.
    """
    spec = find_spec(cfg)
    spec.refuse_broken_groups(cfg, world_size)
    train, total = cfg.train, cfg.train.effective_batch_size
    batch, accum = train.batch_size, train.grad_accum
    given = {name: n for name, n in (("batch_size", batch), ("grad_accum", accum)) if isinstance(n, int)}
    unit = world_size * math.prod(given.values())
    if total % unit or (len(given) == 2 and total != unit):
        made = " x ".join([*(f"{name} {n}" for name, n in given.items()), f"{world_size} process(es)"])
        raise _inexact(cfg, made, near=spec.near_batches(cfg, unit, is_fixed=len(given) == 2))
    share = total // world_size
    if not cfg.task.reads_text and look is None and not given:
        return Split(share, 1, f"all {share} puzzles of a process at once: each keeps its state between steps anyway")
    if isinstance(batch, int) and isinstance(accum, int):
        return Split(batch, accum, "as given")
    if isinstance(batch, int):
        return Split(batch, share // batch, f"{share} rows a process in micro-batches of {batch}")
    if isinstance(accum, int):
        return Split(share // accum, accum, f"{share} rows a process in {accum} micro-batches")
    usual = PLATEAU_TOKENS if look and has_gpu else TOKENS_PER_MICRO_BATCH["gpu" if has_gpu else "cpu"]
    tokens = most_tokens or usual
    room = max(1, tokens // (row_tokens or cfg.row_tokens))
    divisors = [n for n in range(1, share + 1) if share % n == 0]
    helpful = [n for n in divisors if n <= room]
    if look is None:
        rows = helpful[-1]
        return Split(rows, share // rows, f"largest divisor of {share} whose rows stay within {tokens} tokens")
    rows = _largest_that_fits(helpful, look)
    return Split(rows, share // rows, _why(look(rows), helpful, divisors=divisors, tokens=tokens))


def _largest_that_fits(rows: list[int], look: Callable[[int], Forecast]) -> int:
    """Of ascending numbers of rows; the smallest where none fits. A larger micro-batch never takes less."""
    low, high = 0, len(rows)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if look(rows[middle]).verdict == "fits" else (low, middle)
    return rows[max(0, low - 1)]


def _why(chosen: Forecast, helpful: list[int], *, divisors: list[int], tokens: int) -> str:
    rows, share = chosen.size.rows, divisors[-1]
    filled = f"{format_bytes(chosen.peak_bytes)} of {format_bytes(chosen.budget_bytes)} planned with its margin"
    if chosen.verdict != "fits":
        return f"the smallest there is; {filled}: {chosen.verdict.replace('_', ' ')}"
    if rows == share:
        return f"all {share} rows of a process at once: {filled}"
    if rows == helpful[-1]:
        return f"largest divisor of {share} within {tokens} tokens, beyond which more is no faster: {filled}"
    return f"largest divisor of {share} that fits: {filled}"


def _inexact(cfg: RunConfig, made: str, *, near: list[int]) -> ConfigError:
    names = " or ".join(map(str, near))
    other = "leave batch_size and grad_accum on auto" if " x " in made else "use another number of processes"
    return ConfigError(
        f"effective batch {cfg.train.effective_batch_size} cannot be split exactly over {made}",
        where=f"{cfg.origins.get('train.effective_batch_size', 'default')} train.effective_batch_size",
        fix=f"set train.effective_batch_size to {names}, or {other}" if near else other,
    )
