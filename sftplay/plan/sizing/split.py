"""One step's rows in micro-batches: as large as fits the device and helps, and exactly the effective batch in all."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from sftplay.config.run import RunConfig
from sftplay.config.section import find_spec
from sftplay.errors import ConfigError
from sftplay.plan.memory.forecast import Forecast, Hardware, forecast
from sftplay.plan.memory.row_lengths import planned_tokens
from sftplay.plan.memory.step import Size
from sftplay.plan.shape.model_shape import ModelShape
from sftplay.plan.sizing.placement import planned_strategy
from sftplay.plan.sizing.task_sizing import build_setting
from sftplay.units import format_bytes

if TYPE_CHECKING:
    from sftplay.plan.memory.probe_fit import Fit

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
    """Return the function that forecasts a micro-batch of so many rows, for a config in which all else is decided.

    `sampled` completions are sampled at a time.
    """
    setting = build_setting(cfg, shape, hardware=hardware, strategy=planned_strategy(cfg, hardware.world_size), fit=fit)
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
    estimate_for: Callable[[int], Forecast] | None = None,
) -> Split:
    """Choose micro-batch and accumulation whose product over all processes is exactly the effective batch.

    `row_tokens` is the length of the longest row, None for rows of full length; `most_tokens` the most tokens of an
    automatic micro-batch, None for what suits rows of text. With `estimate_for`, which forecasts a micro-batch of so
    many rows, an automatic one is the largest that fits the device and still helps.

    Raises:
        ConfigError: there is none; the nearest effective batches are named.
    """
    spec, train = find_spec(cfg), cfg.train
    spec.refuse_broken_groups(cfg, world_size)
    batch, accum, total = train.batch_size, train.grad_accum, train.effective_batch_size
    given = {name: n for name, n in (("batch_size", batch), ("grad_accum", accum)) if isinstance(n, int)}
    unit = world_size * math.prod(given.values())
    if total % unit or (len(given) == 2 and total != unit):
        sizes = " x ".join([*(f"{name} {n}" for name, n in given.items()), f"{world_size} process(es)"])
        near = " or ".join(map(str, spec.near_batches(cfg, unit, is_fixed=len(given) == 2)))
        other = "leave batch_size and grad_accum on auto" if given else "use another number of processes"
        where = f"{cfg.origins.get('train.effective_batch_size', 'default')} train.effective_batch_size"
        fix = f"set train.effective_batch_size to {near}, or {other}" if near else other
        raise ConfigError(f"effective batch {total} cannot be split exactly over {sizes}", where=where, fix=fix)
    share = total // world_size
    if not cfg.task.reads_text and estimate_for is None and not given:
        return Split(share, 1, f"all {share} puzzles of a process at once: each keeps its state between steps anyway")
    if isinstance(batch, int) and isinstance(accum, int):
        return Split(batch, accum, "as given")
    if isinstance(batch, int):
        return Split(batch, share // batch, f"{share} rows a process in micro-batches of {batch}")
    if isinstance(accum, int):
        return Split(share // accum, accum, f"{share} rows a process in {accum} micro-batches")
    usual = PLATEAU_TOKENS if estimate_for and has_gpu else TOKENS_PER_MICRO_BATCH["gpu" if has_gpu else "cpu"]
    tokens = most_tokens or usual
    room = max(1, tokens // (row_tokens or cfg.row_tokens))
    helpful = [n for n in range(1, share + 1) if share % n == 0 and n <= room]
    if estimate_for is None:
        rows = helpful[-1]
        return Split(rows, share // rows, f"largest divisor of {share} whose rows stay within {tokens} tokens")
    # A larger micro-batch never takes less. Where none fits, the smallest is taken.
    n_fitting = bisect_left(helpful, True, key=lambda rows: estimate_for(rows).verdict != "fits")
    rows = helpful[max(0, n_fitting - 1)]
    chosen = estimate_for(rows)
    filled = f"{format_bytes(chosen.peak_bytes)} of {format_bytes(chosen.budget_bytes)} planned with its margin"
    if chosen.verdict != "fits":
        reason = f"the smallest there is; {filled}: {chosen.verdict.replace('_', ' ')}"
    elif rows == share:
        reason = f"all {share} rows of a process at once: {filled}"
    elif rows == helpful[-1]:
        reason = f"largest divisor of {share} within {tokens} tokens, beyond which more is no faster: {filled}"
    else:
        reason = f"largest divisor of {share} that fits: {filled}"
    return Split(rows, share // rows, reason)
