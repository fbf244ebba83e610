"""From `auto` to numbers and names: backend, precision, attention, loss head, packing, optimizer, rate, batch sizes.

What holds whatever the hardware: `batch_size * grad_accum * processes == effective_batch_size`, an explicit value is
never changed, and every choice comes with its reason. Below this module no config value is `auto`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from sftplay.config.schema.run import RunConfig
from sftplay.errors import ConfigError, MachineError
from sftplay.machine.probe import Machine
from sftplay.plan.memory.budget import Device, device_of
from sftplay.plan.memory.execution import execution_of
from sftplay.plan.memory.forecast import Forecast, Setting, forecast
from sftplay.plan.memory.probe_fit import Fit
from sftplay.plan.memory.step import Size
from sftplay.plan.shape.model_shape import ModelShape
from sftplay.plan.sizing.communication import refuse_hook
from sftplay.plan.sizing.decisions import Decision as Decision
from sftplay.plan.sizing.decisions import choose_backend, decide_numerics, decide_rate, scaled_rate, without_effect
from sftplay.plan.sizing.strategy import choose_strategy, planned_strategy
from sftplay.units import format_bytes

TOKENS_PER_MICRO_BATCH = {"gpu": 16_384, "cpu": 1_024}
"""Rows go through the model together up to about this many tokens. A GPU needs them to be busy; a CPU is busy with one
row, and small pieces of rows of like length carry less padding (measured in docs/benchmarks.md)."""

PLATEAU_TOKENS = 65_536
"""Where memory is planned, a GPU's micro-batch may hold this many tokens; matrices of that many rows keep any card busy
(a product becomes bound by arithmetic at some hundred rows), so that more would only fill memory."""

LARGE_SCORES_BYTES = 2**31
"""From here on the scores of one micro-batch are computed in chunks: a tenth of the RAM these kits usually run in."""

ASSUMED_VOCAB = 128_000
"""Taken for a model whose config.json is not on this machine yet; few have more."""

CHUNKED_WINS_VOCAB = 32_000
"""Vocabulary above which holding all scores costs a GPU more than recomputing them in chunks."""


@dataclass(frozen=True)
class SizedRun:
    """A config without any `auto`, and how it came about."""

    cfg: RunConfig
    world_size: int
    decisions: tuple[Decision, ...]
    notes: tuple[str, ...] = ()
    """What was asked for and has no effect on this machine, and what could not be planned."""

    forecast: Forecast | None = None
    """None where the model's shape is not known before the download."""

    def as_plan(self) -> dict[str, Any]:
        """What goes to plan.json."""
        train = self.cfg.train
        sizes = {
            "world_size": self.world_size,
            "batch_size": train.batch_size,
            "grad_accum": train.grad_accum,
            "effective_batch_size": train.effective_batch_size,
            "learning_rate": train.peak_rate,
            "decisions": [vars(decision) for decision in self.decisions],
        }
        if self.forecast is None:
            return sizes
        setting = self.forecast.setting
        inputs = {"device": vars(setting.device), "strategy": setting.strategy, "model": setting.shape.name}
        return {**sizes, **self.forecast.as_dict(), **inputs}


def size_run(
    cfg: RunConfig,
    machine: Machine,
    *,
    world_size: int = 1,
    vocab_size: int | None = None,
    shape: ModelShape | None = None,
    local_processes: int | None = None,
    fit: Fit | None = None,
) -> SizedRun:
    """Replace every `auto` by a number or a name.

    `shape` is the model's, None when it is not known before the download; `vocab_size` may be known without it.
    `local_processes` is how many of the `world_size` share this machine, None for all. `fit` is what a probe measured.

    Raises:
        ConfigError: the effective batch cannot be reached exactly; both neighbours are named.
        MachineError: an explicit backend, precision, attention, loss head or hook cannot run here.
    """
    refuse_hook(cfg, machine, world_size)
    given, backend = cfg, Decision("tuning.backend", *choose_backend(cfg, machine, world_size))
    cfg = cfg.with_values({backend.key: backend.value}, cfg.origins.get(backend.key, "auto"))
    decisions = [backend, *decide_numerics(cfg, machine), decide_rate(cfg)]
    usual, _, _ = split_batch(cfg, world_size, has_gpu=bool(machine.gpus))
    decisions += [_decide_head(cfg, machine, usual, shape.vocab if shape else vocab_size)]
    decided = cfg.with_values({d.key: d.value for d in decisions if _get(cfg, d.key) == "auto"}, "auto")
    look, device = None, device_of(machine, local_processes or world_size)
    shared = choose_strategy(decided, shape, device, world_size)
    if cfg.cluster.strategy == "auto":
        decisions.insert(1, shared)
        decided = decided.with_values({shared.key: shared.value}, "auto")
    if shape is not None:
        if device.is_gpu and cfg.train.loss_head == "auto":
            head = _compare_heads(decided, shape, device, world_size)
            decisions[-1], decided = head, decided.with_values({head.key: head.value}, "auto")
        look = foresight(decided, shape, device, world_size, fit=fit)
    batch, accum, reason = split_batch(decided, world_size, has_gpu=bool(machine.gpus), look=look)
    decisions += [Decision("train.batch_size", batch, reason), Decision("train.grad_accum", accum, reason)]
    values = {d.key: d.value for d in decisions if _get(given, d.key) == "auto"}
    sized = given.with_values(values, "auto")
    unknown = () if shape else (f"memory is not planned: the shape of {cfg.model.name} is not known here",)
    return SizedRun(
        sized,
        world_size,
        tuple(d for d in decisions if d.key in values),
        (*scaled_rate(sized), *without_effect(sized, machine), *unknown),
        look(batch) if look else None,
    )


def foresight(
    cfg: RunConfig, shape: ModelShape, device: Device, world_size: int, *, fit: Fit | None = None
) -> Callable[[int], Forecast]:
    """The forecast of a micro-batch of so many rows, for a config in which all but the sizes is decided."""
    strategy = planned_strategy(cfg, world_size)
    setting = Setting(
        shape=shape, path=execution_of(cfg), device=device, strategy=strategy, world_size=world_size, fit=fit
    )
    share = cfg.train.effective_batch_size // world_size
    return lambda rows: forecast(setting, Size(rows=rows, seq=cfg.model.max_seq_len, accumulates=rows < share))


def split_batch(
    cfg: RunConfig,
    world_size: int,
    *,
    has_gpu: bool,
    look: Callable[[int], Forecast] | None = None,
) -> tuple[int, int, str]:
    """Micro-batch and accumulation whose product over all processes is exactly the effective batch, and the reason.

    With `look`, which forecasts a micro-batch, an automatic one is the largest that fits the device and still helps.
    """
    train, total = cfg.train, cfg.train.effective_batch_size
    batch, accum = train.batch_size, train.grad_accum
    given = {name: n for name, n in (("batch_size", batch), ("grad_accum", accum)) if isinstance(n, int)}
    unit = world_size * math.prod(given.values())
    if total % unit or (len(given) == 2 and total != unit):
        made = " x ".join([*(f"{name} {n}" for name, n in given.items()), f"{world_size} process(es)"])
        low = total // unit * unit
        raise _inexact(cfg, made, [unit] if len(given) == 2 else [low, low + unit])
    share = total // world_size
    if isinstance(batch, int) and isinstance(accum, int):
        return batch, accum, "as given"
    if isinstance(batch, int):
        return batch, share // batch, f"{share} rows a process in pieces of {batch}"
    if isinstance(accum, int):
        return share // accum, accum, f"{share} rows a process in {accum} pieces"
    tokens = TOKENS_PER_MICRO_BATCH["gpu" if has_gpu else "cpu"] if look is None or not has_gpu else PLATEAU_TOKENS
    room = max(1, tokens // cfg.model.max_seq_len)
    divisors = [n for n in range(1, share + 1) if share % n == 0]
    helpful = [n for n in divisors if n <= room]
    if look is None:
        rows = max(helpful)
        return rows, share // rows, f"largest divisor of {share} whose rows stay within {tokens} tokens"
    rows = _largest_that_fits(helpful, look)
    return rows, share // rows, _why(look(rows), helpful, divisors, tokens)


def _largest_that_fits(rows: list[int], look: Callable[[int], Forecast]) -> int:
    """Of ascending numbers of rows; the smallest where none fits. A larger piece never takes less memory."""
    low, high = 0, len(rows)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if look(rows[middle]).verdict == "fits" else (low, middle)
    return rows[max(0, low - 1)]


def _why(chosen: Forecast, helpful: list[int], divisors: list[int], tokens: int) -> str:
    rows, share = chosen.size.rows, divisors[-1]
    filled = f"{format_bytes(chosen.peak_bytes)} of {format_bytes(chosen.budget_bytes)} planned with its margin"
    if chosen.verdict != "fits":
        return f"the smallest there is; {filled}: {chosen.verdict.replace('_', ' ')}"
    if rows == share:
        return f"all {share} rows of a process at once: {filled}"
    if rows == helpful[-1]:
        return f"largest divisor of {share} within {tokens} tokens, beyond which more is no faster: {filled}"
    return f"largest divisor of {share} that fits: {filled}"


def _inexact(cfg: RunConfig, made: str, near: list[int]) -> ConfigError:
    names = " or ".join(str(n) for n in near if n > 0)
    other = "leave batch_size and grad_accum on auto" if " x " in made else "use another number of processes"
    return ConfigError(
        f"effective batch {cfg.train.effective_batch_size} cannot be split exactly over {made}",
        where=f"{cfg.origins.get('train.effective_batch_size', 'default')} train.effective_batch_size",
        fix=f"set train.effective_batch_size to {names}, or {other}",
    )


def _decide_head(cfg: RunConfig, machine: Machine, batch: int, vocab_size: int | None) -> Decision:
    wanted, key = cfg.train.loss_head, "train.loss_head"
    if wanted == "liger" and (not machine.gpus or find_spec("liger_kernel") is None):
        raise MachineError(
            "the liger loss head needs a GPU and the package liger-kernel",
            where=f"{cfg.origins.get(key, 'train')} {key}",
            fix="leave train.loss_head on auto",
        )
    if cfg.tuning.backend == "unsloth":
        return Decision(key, "standard", "unsloth puts a loss of its own into the model")
    vocab = vocab_size or ASSUMED_VOCAB
    scores_bytes = batch * cfg.model.max_seq_len * vocab * 4
    size = format_bytes(scores_bytes) + ("" if vocab_size else f" at most, for a vocabulary of {vocab} or less")
    if machine.gpus and vocab > CHUNKED_WINS_VOCAB:
        return Decision(key, "chunked", f"a vocabulary of {vocab} on a GPU: whole scores would crowd out the batch")
    if scores_bytes > LARGE_SCORES_BYTES:
        return Decision(key, "chunked", f"whole scores of one piece would take {size}")
    return Decision(key, "standard", f"scores of one piece take {size}; no recomputation needed")


def _compare_heads(cfg: RunConfig, shape: ModelShape, device: Device, world_size: int) -> Decision:
    """Whole scores unless chunks of them make room for a larger micro-batch, or for one at all."""
    seen = {}
    for head in ("standard", "chunked"):
        look = foresight(cfg.with_values({"train.loss_head": head}, "auto"), shape, device, world_size)
        rows, _, _ = split_batch(cfg, world_size, has_gpu=True, look=look)
        seen[head] = look(rows)
    whole, chunks = seen["standard"], seen["chunked"]
    sizes = f"{chunks.size.rows} rows a piece in place of {whole.size.rows}"
    if chunks.size.rows > whole.size.rows:
        return Decision(
            "train.loss_head", "chunked", f"a vocabulary of {shape.vocab} in chunks leaves room for {sizes}"
        )
    if whole.verdict != "fits" and chunks.peak_bytes < whole.peak_bytes:
        saved = format_bytes(whole.peak_bytes - chunks.peak_bytes)
        return Decision("train.loss_head", "chunked", f"a vocabulary of {shape.vocab} in chunks takes {saved} less")
    return Decision(
        "train.loss_head", "standard", "chunks would make room for no larger piece, and compute scores twice"
    )


def _get(cfg: RunConfig, dotted: str) -> Any:
    value: Any = cfg
    for part in dotted.split("."):
        value = getattr(value, part)
    return value
