"""From `auto` to numbers, each with its reason: precision, kernels, optimizer, rate, strategy, micro-batches."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec as find_module
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from sftplay.config.cluster import BACKEND, unsloth_conflicts
from sftplay.config.run import FLASH_KERNELS, RunConfig
from sftplay.config.section import find_spec
from sftplay.errors import ConfigError, MachineError
from sftplay.plan.config_json import COMMON
from sftplay.plan.forecast import (
    Forecast,
    Hardware,
    RowLengths,
    Setting,
    Size,
    Strategy,
    TaskMemory,
    find_device,
    forecast,
    on_device,
    planned_tokens,
)
from sftplay.plan.memory_setup import read_memory_setup
from sftplay.plan.shape import ModelShape
from sftplay.units import format_bytes

if TYPE_CHECKING:
    from sftplay.machine.gpu import Machine
    from sftplay.plan.fit import Fit


@dataclass(frozen=True)
class Decision:
    """A value that the kit chose for a key, and why."""

    value: Any
    reason: str


Decisions = dict[str, Decision]  # by config key

UNSLOTH_FIX = f"`make train-unsloth` builds and uses an environment that has it; or write {BACKEND}: bnb"


def choose_backend(cfg: RunConfig, machine: Machine, *, world_size: int) -> Decision:
    """Choose `bnb` or `unsloth`.

    Raises:
        MachineError: unsloth is asked for and cannot be used. It is never replaced in silence.
    """
    wanted = cfg.tuning.backend
    if wanted == "bnb":
        return Decision("bnb", "as given")
    obstacle, fix = machine.unsloth_problem, UNSLOTH_FIX
    if world_size > 1:
        # Not tried here with several GPUs, and its own source calls that a beta.
        obstacle = f"it trains in one process, not in {world_size}"
        fix = f"use one process, or write {BACKEND}: bnb"
    for conflict in islice(unsloth_conflicts(cfg), 1):
        obstacle, fix = f"{conflict.keys[0]}: {conflict.what}", conflict.fix
    if wanted == "unsloth":
        if obstacle:
            where = cfg.describe_origin(BACKEND)
            raise MachineError(f"unsloth cannot be used: {obstacle}", where=where, fix=fix)
        return Decision("unsloth", "as given")
    if obstacle:
        return Decision("bnb", f"unsloth is not taken: {obstacle}")
    if not machine.gpus:
        return Decision("bnb", "unsloth is installed, but without a GPU it computes with the same libraries")
    return Decision("unsloth", "it is installed, there is a GPU, and every library is within the versions it asks for")


def decide_numerics(cfg: RunConfig, machine: Machine, *, shape: ModelShape | None = None) -> Decisions:
    """Decide precision, attention, packing, optimizer, pinned memory, learning rate.

    `shape` is the model's, None where it is not known.

    Raises:
        MachineError: an explicit precision or attention cannot run here.
    """
    train, gpus = cfg.train, machine.gpus
    if not gpus and train.precision == "fp16":
        where = cfg.describe_origin("train.precision", unset="train")
        fix = "leave train.precision on auto (fp32 here), or use bf16"
        raise MachineError("fp16 needs a GPU; on a CPU it would be ignored", where=where, fix=fix)
    precision = Decision("fp32", "no GPU: a CPU computes fp32 fastest")
    has_bf16 = bool(gpus) and all(gpu.has_bf16 for gpu in gpus)
    if has_bf16:
        precision = Decision("bf16", "every GPU has bf16 (compute capability 8.0 or later)")
    elif gpus and not cfg.task.has_fp16:
        precision = Decision("fp32", "a GPU older than Ampere has no bf16, and fp16 would overflow in the loss")
    elif gpus:
        precision = Decision("fp16", "a GPU older than Ampere has no bf16")
    chosen = precision.value if train.precision == "auto" else train.precision
    has_flash = has_bf16 and chosen != "fp32" and find_module("flash_attn") is not None
    package = "kernels" if "/" in cfg.model.attn else "flash_attn"
    can_flash = has_bf16 and chosen != "fp32" and find_module(package) is not None
    where = cfg.describe_origin("model.attn", unset="model")
    if cfg.model.attn in FLASH_KERNELS and not can_flash:
        needs = f"an Ampere GPU, 16-bit precision and the package {package.replace('_', '-')}"
        raise MachineError(f"{cfg.model.attn} needs {needs}", where=where, fix="leave model.attn on auto (sdpa here)")
    family = shape.family if shape is not None else ""
    missing = set()
    if family not in COMMON:
        from sftplay.plan.more_families import missing_attention

        missing = missing_attention(family)
    has_flash = has_flash and "flash_attention_2" not in missing
    attn = Decision("flash_attention_2" if has_flash else "sdpa", "fastest kernel installed for this device")
    if "sdpa" in missing and not has_flash:
        attn = Decision("eager", f"transformers' class of {family} has neither sdpa nor a flash kernel that is here")
    if shape is not None and shape.softcap_attn:
        if cfg.model.attn == "sdpa":
            fix = f"leave model.attn on auto ({'flash_attention_2' if has_flash else 'eager'} here)"
            what = "the model caps the scores of its attention, which sdpa does not do"
            raise MachineError(what, where=where, fix=fix)
        attn = attn if has_flash else Decision("eager", "the model caps the scores of its attention; sdpa does not")
    if shape is not None and shape.family == "gpt_oss" and cfg.model.attn != "eager" and "/" not in cfg.model.attn:
        if cfg.model.attn != "auto":
            what = f"its attention has a learned sink, which {cfg.model.attn} leaves out"
            raise MachineError(what, where=where, fix="leave model.attn on auto (eager here)")
        attn = Decision("eager", "its attention has a learned sink, which no installed kernel knows")
    if cfg.model.attn in missing:
        what = f"transformers' class of {family} has no {cfg.model.attn}"
        raise MachineError(what, where=where, fix=f"leave model.attn on auto ({attn.value} here)")
    has_varlen = (attn.value if cfg.model.attn == "auto" else cfg.model.attn) in FLASH_KERNELS
    by_tokens = train.batching == "tokens"
    why = "flash attention skips the gaps" if has_varlen else "without a varlen kernel packing costs more than it saves"
    why = "train.batching tokens forms micro-batches of padded rows" if by_tokens else why
    why = "the rows are full blocks already" if cfg.learns_documents else why
    hands_on = shape is not None and shape.state_leaks
    if hands_on and cfg.packs_rows:
        what, where = "its layers carry a state from one packed row into the next", cfg.origins.get("train.packing", "")
        raise ConfigError(what, where=f"{where} train.packing true", fix="write train.packing: false, or auto")
    why = "layers carry a state along the row, which packed rows would hand on" if hands_on else why
    rate = cfg.task.rates[cfg.tuning.mode]
    return {
        "train.precision": precision,
        "model.attn": attn,
        "train.packing": Decision(has_varlen and not by_tokens and not cfg.learns_documents and not hands_on, why),
        "train.optim": _decide_optimizer(cfg, chosen),
        "train.dataloader_pin_memory": Decision(bool(gpus), "page-locked memory speeds copies to a GPU only"),
        "train.learning_rate": Decision(rate, f"usual peak rate of {cfg.tuning.mode} {cfg.task_mode}"),
    }


def _decide_optimizer(cfg: RunConfig, precision: str) -> Decision:
    """AdamW; in fp16 not torch's fused one.

    That one unscales the gradients and leaves steps out by itself (torch, `GradScaler.step`,
    `_step_supports_amp_scaling`). accelerate then sees every step as taken, and steps that overflow use up the warm-up.
    """
    if precision != "fp16":
        return Decision("adamw_torch_fused", "one kernel a step, no copy of the gradients")
    if cfg.train.optim == "adamw_torch_fused":
        what = "in fp16 it hides from the schedule which steps overflowed and were left out"
        where = f"{cfg.origins.get('train.optim', 'train')} train.optim adamw_torch_fused"
        raise ConfigError(what, where=where, fix="write train.optim: adamw_torch, or leave it on auto")
    return Decision("adamw_torch", "in fp16 the fused one hides which steps were left out")


def scaled_rate(cfg: RunConfig) -> tuple[str, ...]:
    """Return a note on the rate that `train.lr_scaling` makes of the one written down; none where nothing is scaled."""
    train = cfg.train
    if train.lr_scaling == "none":
        return ()
    batches = f"found with {train.lr_batch_size} rows a step, {train.effective_batch_size} here"
    found = f"train.learning_rate {train.learning_rate:g} {batches}"
    return (f"{found}: train.lr_scaling {train.lr_scaling} trains with a peak rate of {train.peak_rate:.6g}",)


def without_effect(cfg: RunConfig, machine: Machine) -> tuple[str, ...]:
    """Return a note on each setting that has no effect on this machine, or in this task."""
    if machine.gpus:
        if cfg.task.is_probed or cfg.train.probe == "off":
            return ()
        return (f"train.probe measures no step of task_mode {cfg.task_mode}: its memory is estimated",)
    asked = {"train.dataloader_pin_memory": cfg.train.dataloader_pin_memory is True}
    asked["train.probe always"] = cfg.train.probe == "always"
    # Without a GPU processes talk over gloo, which shares the interface with NCCL and nothing else.
    nccl = cfg.cluster.nccl.model_dump(exclude={"socket_ifname"}, exclude_none=True)
    asked |= dict.fromkeys((f"cluster.nccl.{name}" for name in nccl), True)
    return tuple(f"{key} has no effect without a GPU" for key, is_asked in asked.items() if is_asked)


@dataclass(frozen=True)
class SizedRun:
    """A config without any `auto`, and how it came about."""

    cfg: RunConfig
    world_size: int
    decisions: Decisions  # of the keys that stood on `auto`
    notes: tuple[str, ...] = ()  # settings without effect on this machine, and what could not be planned
    forecast: Forecast | None = None  # None where the model's shape is not known before the download

    def as_plan(self) -> dict[str, Any]:
        """What goes to plan.json."""
        train = self.cfg.train
        sizes = {
            "world_size": self.world_size,
            "batch_size": train.batch_size,
            "grad_accum": train.grad_accum,
            "effective_batch_size": train.effective_batch_size,
            "learning_rate": train.peak_rate,
            **find_sizing(self.cfg).plan_fields(self.cfg),
            "decisions": [{"key": key, **vars(decision)} for key, decision in self.decisions.items()],
        }
        if self.forecast is None:
            return sizes
        setting = self.forecast.setting
        inputs = {"device": vars(setting.device), "strategy": setting.strategy, "model": setting.shape.name}
        return {**sizes, **self.forecast.as_dict(), **inputs}


class TaskSizing:
    """A task while a run is sized, here as sft answers. Its `plan.py` holds one as PLAN, where it differs."""

    splits_by_strategy = True
    """Whether `cluster.strategy` alone splits the model over the processes."""

    def known_shape(self, cfg: RunConfig) -> ModelShape | None:
        """Return the shape of a model that `model.name` does not decide; asked only where there is no text."""
        return None

    def memory(self, cfg: RunConfig, *, hardware: Hardware) -> TaskMemory | None:
        """Return the memory of a step that is more than plain rows."""
        return None

    def size_whole(self, cfg: RunConfig, machine: Machine, *, shape: ModelShape, hardware: Hardware) -> SizedRun | None:
        """Size a run that shares no decision with a language model; None for any other."""
        return None

    def refuse_machine(self, cfg: RunConfig, machine: Machine, *, world_size: int) -> None:
        """Check that the task can run here.

        Raises:
            MachineError: a library or a GPU is missing or too old.
            ConfigError: the number of processes does not go with the config.
        """

    def choose_placement(self, cfg: RunConfig, shape: ModelShape | None, *, hardware: Hardware) -> Decisions:
        """Decide where the task's models lie, where the config leaves that open."""
        return {}

    def fixed_strategy(self, cfg: RunConfig) -> Decision | None:
        """Return the strategy where the task leaves no choice."""
        return None

    def fixed_head(self, cfg: RunConfig) -> Decision | None:
        """Return the loss head where the task leaves no choice."""
        return None

    def decide_more(self, cfg: RunConfig, machine: Machine) -> Decisions:
        """Decide keys of the task's own section that depend on the machine alone."""
        return {}

    def decide_sampling(self, cfg: RunConfig, shape: ModelShape | None, *, hardware: Hardware) -> Decisions:
        """Decide how many answers are sampled at a time, where any are."""
        return {}

    def rows_sampled(self, cfg: RunConfig) -> int:
        """Return the answers that a process samples at a time, once it is decided; 0 where it samples none."""
        return 0

    def uses_several_gpus(self, cfg: RunConfig) -> bool:
        """Return whether one process may use a second GPU; the placement may be undecided."""
        return False

    def compiled(self, cfg: RunConfig) -> tuple[str, bool, str]:
        """Return the key that asks for kernels which Triton builds, whether it does, and the value that does not."""
        return "train.loss_head", cfg.train.loss_head == "liger", "chunked"

    def notes(self, cfg: RunConfig, shape: ModelShape | None) -> tuple[str, ...]:
        """Return what the user should know of a sized run."""
        return ()

    def plan_fields(self, cfg: RunConfig) -> dict[str, int]:
        """Return the task's own fields of plan.json; the preflight compares them with the trainer."""
        return {}

    def lengths(self, cfg: RunConfig) -> Iterator[tuple[str, int, int]]:
        """Yield what shorter rows would mean: the key, its value, and what must stay below it."""
        yield "cpt.block_size" if cfg.learns_documents else "model.max_seq_len", cfg.row_tokens, 0

    def steps(self, cfg: RunConfig) -> tuple[int, str] | None:
        """Return the optimizer steps of a run and why, where the task's own keys decide them."""
        return None

    def rows_per_record(self, cfg: RunConfig) -> int:
        """Return the rows of a step that a row of the file makes."""
        return 1

    def describe_length(self, cfg: RunConfig) -> str:
        return f"full blocks of {cfg.row_tokens} tokens" if cfg.learns_documents else "every row at full length"


def find_sizing(cfg: RunConfig) -> TaskSizing:
    """Find what the config's task answers, imported only now."""
    part = cfg.task.part("plan")
    return cast("TaskSizing", part.PLAN) if part else TaskSizing()


def build_setting(
    cfg: RunConfig, shape: ModelShape, *, hardware: Hardware, strategy: Strategy, fit: Fit | None = None
) -> Setting:
    """Build the setting of a config in which all but the sizes is decided."""
    execution = on_device(read_memory_setup(cfg), shape, device=hardware.device)
    is_copied = cfg.cluster.strategy == "hsdp" and strategy == "fsdp"  # once on each node, twice on a single one
    copies = max(2, hardware.world_size // (hardware.gpus or hardware.world_size)) if is_copied else 1
    return Setting(
        shape=shape, execution=execution, device=hardware.device, strategy=strategy, world_size=hardware.world_size,
        copies=copies, fit=fit, task=find_sizing(cfg).memory(cfg, hardware=hardware), measures_first=cfg.eval.before,
    )  # fmt: skip


def forecast_one_row(cfg: RunConfig, shape: ModelShape, *, hardware: Hardware, strategy: Strategy) -> Forecast:
    """Forecast one row a micro-batch, and one completion sampled at a time, the least that a run can do with.

    `cfg` has no `auto` besides its sizes.
    """
    setting = build_setting(cfg, shape, hardware=hardware, strategy=strategy)
    accumulates = cfg.train.effective_batch_size > hardware.world_size
    return forecast(setting, Size(rows=1, seq=planned_tokens(cfg, hardware.lengths), accumulates=accumulates))


STRATEGY = "cluster.strategy"


def planned_strategy(cfg: RunConfig, world_size: int) -> Strategy:
    """Return what the memory plan calls the strategy of a config in which it is decided."""
    if world_size == 1:
        return "single"
    kinds: dict[str, Strategy] = {"zero1": "zero1", "zero2": "zero2", "zero3": "zero3", "fsdp": "fsdp", "hsdp": "fsdp"}
    return kinds.get(cfg.cluster.strategy, "ddp")


def choose_strategy(cfg: RunConfig, shape: ModelShape | None, *, hardware: Hardware) -> Decision:
    """Choose the first of ddp, zero3 and fsdp that holds one row; ddp where none does or nothing can be said."""
    if hardware.world_size == 1:
        return Decision("ddp", "one process holds everything")
    if fixed := find_sizing(cfg).fixed_strategy(cfg):
        return fixed
    if shape is None:
        return Decision("ddp", "the model's shape is not known here, so nothing says that it must be split")
    if not hardware.device.is_gpu:
        return Decision("ddp", "processes on CPUs share one memory: a split would save nothing")
    whole = forecast_one_row(cfg, shape, hardware=hardware, strategy="ddp")
    need = format_bytes(whole.peak_bytes)
    if whole.verdict != "does_not_fit":
        saved = whole.peak_bytes - forecast_one_row(cfg, shape, hardware=hardware, strategy="zero2").peak_bytes
        saving = f"; zero2 would save {format_bytes(saved)} of {need}" if saved > 0 else ""
        return Decision("ddp", f"each GPU can hold all of it{saving}")
    if cfg.tuning.trains_single_rows:
        return Decision("ddp", "the rows of new tokens train only where each GPU has whole matrices")
    # Splits of all weights, as far as they are installed; 4-bit weights are split by torch alone.
    has_zero = cfg.tuning.mode != "qlora" and find_module("deepspeed") is not None
    splits: tuple[Strategy, ...] = ("zero3", "fsdp") if has_zero else ("fsdp",)
    for strategy in splits:
        split = forecast_one_row(cfg, shape, hardware=hardware, strategy=strategy)
        if split.verdict != "does_not_fit":
            room = format_bytes(whole.budget_bytes)
            reason = f"ddp needs {need} of {room} on each GPU, split it is {format_bytes(split.peak_bytes)}"
            return Decision(strategy, reason)
    return Decision("ddp", "no split makes it fit either")


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

    `row_tokens` is the length of the longest row (None: full); `most_tokens` bounds an automatic micro-batch (None: as
    usual). With `estimate_for`, which forecasts so many rows, it is the largest that fits and still helps.

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
        where = cfg.describe_origin("train.effective_batch_size")
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
        parts = f"in {accum} micro-batches" if accum > 1 else "at once"
        return Split(share // accum, accum, f"{share} rows a process {parts}")
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


LOSS_HEAD, BATCH_SIZE, GRAD_ACCUM = "train.loss_head", "train.batch_size", "train.grad_accum"

LARGE_SCORES_BYTES = 2**31
"""From here on the scores of one micro-batch are computed in chunks: a tenth of the RAM these kits usually run in."""

ASSUMED_VOCAB = 128_000  # taken for a model whose config.json is not on this machine yet; few have more

CHUNKED_WINS_VOCAB = 32_000
"""Vocabulary above which holding all scores costs a GPU more than recomputing them in chunks."""


def size_run(
    cfg: RunConfig,
    machine: Machine,
    *,
    world_size: int = 1,
    vocab_size: int | None = None,
    shape: ModelShape | None = None,
    local_processes: int | None = None,
    fit: Fit | None = None,
    lengths: RowLengths | None = None,
) -> SizedRun:
    """Replace every `auto` by a number or a name.

    `shape` is None when it is not known before the download; `vocab_size` may be known without it. `local_processes` of
    the `world_size` share this machine, None for all. Without `lengths` every row counts as full.

    Raises:
        ConfigError: the effective batch cannot be reached exactly; both neighbours are named.
        MachineError: an explicit backend, precision, attention, loss head or hook cannot run here.
    """
    key = "cluster.comm.hook"
    if cfg.cluster.comm.hook == "bf16" and world_size > 1 and not machine.gpus:
        what = "torch's bf16 hook runs on NCCL only, and without a GPU processes talk through gloo"
        where, fix = cfg.describe_origin(key, unset="cluster"), "write fp16, or none, which is faster on one machine"
        raise MachineError(what, where=where, fix=fix, nearest=("fp16", "none"))
    task, processes = find_sizing(cfg), local_processes or world_size
    task.refuse_machine(cfg, machine, world_size=world_size)
    hardware = Hardware(find_device(machine, processes), world_size, lengths)
    if shape is not None and (whole := task.size_whole(cfg, machine, shape=shape, hardware=hardware)):
        return whole
    first = {BACKEND: choose_backend(cfg, machine, world_size=world_size)}
    decided = fill_open(cfg, first)
    rest = decide_numerics(decided, machine, shape=shape) | task.decide_more(decided, machine)
    decided = fill_open(decided, rest)
    vocab_size = shape.vocab if shape else vocab_size
    routes = shape is not None and shape.adds_router_loss and task.fixed_head(cfg) is None
    rest[LOSS_HEAD] = (
        Decision("standard", "config.json has the router add a loss (output_router_logits), which chunks leave out")
        if routes
        else _decide_head(decided, machine, hardware=hardware, vocab_size=vocab_size)
    )
    decided = fill_open(decided, rest)
    first |= task.choose_placement(decided, shape, hardware=hardware)
    decided = fill_open(decided, first)
    first[STRATEGY] = choose_strategy(decided, shape, hardware=hardware)
    decided = fill_open(decided, first)
    rest |= task.decide_sampling(decided, shape, hardware=hardware)
    decided = fill_open(decided, rest)
    estimate_for = None
    if shape is not None:
        if machine.gpus and cfg.train.loss_head == "auto" and task.fixed_head(cfg) is None and not routes:
            decided, rest[LOSS_HEAD] = _compare_heads(decided, shape, hardware=hardware)
        sampled = task.rows_sampled(decided)
        estimate_for = foresight(decided, shape, hardware=hardware, fit=fit, sampled=sampled)
    tokens, has_gpu = planned_tokens(decided, lengths), bool(machine.gpus)
    split = split_batch(decided, world_size, has_gpu=has_gpu, row_tokens=tokens, estimate_for=estimate_for)
    rest |= {BATCH_SIZE: Decision(split.rows, split.reason), GRAD_ACCUM: Decision(split.accum, split.reason)}
    sized = fill_open(decided, rest)
    notes = [*scaled_rate(sized), *task.notes(sized, shape), *without_effect(sized, machine)]
    if shape is not None and shape.experts:
        from sftplay.plan.mixers import describe_adapted

        notes += describe_adapted(sized, shape)
    seen = estimate_for(int(sized.train.batch_size)) if estimate_for else None
    if seen is None:
        notes.append(f"memory is not planned: the shape of {cfg.model.name} is not known here")
    elif seen.opens_on_host and seen.host_bytes * processes > machine.ram_available:
        need, free = format_bytes(seen.host_bytes * processes), format_bytes(machine.ram_available)
        where = f"{processes} processes open the model in the host's memory before they split it"
        notes.append(f"{where}: {need}, and {free} are free")
    decisions = {key: decision for key, decision in {**first, **rest}.items() if is_open(cfg, key)}
    return SizedRun(sized, world_size, decisions, tuple(notes), seen)


def fill_open(cfg: RunConfig, decisions: Decisions) -> RunConfig:
    """Return the config with decided values where it says `auto`."""
    values = {key: decision.value for key, decision in decisions.items() if is_open(cfg, key)}
    return cfg.with_values(values, "auto") if values else cfg


def is_open(cfg: RunConfig, key: str) -> bool:
    return cfg.get_value(key) in ("auto", None)


def _decide_head(cfg: RunConfig, machine: Machine, *, hardware: Hardware, vocab_size: int | None) -> Decision:
    wanted = cfg.train.loss_head
    if fixed := find_sizing(cfg).fixed_head(cfg):
        return fixed
    if wanted == "liger" and (not machine.gpus or find_module("liger_kernel") is None):
        what, at = "the liger loss head needs a GPU and the package liger-kernel", cfg.origins.get(LOSS_HEAD, "train")
        raise MachineError(what, where=f"{at} {LOSS_HEAD}", fix="leave train.loss_head on auto")
    if cfg.tuning.backend == "unsloth":
        return Decision("standard", "unsloth puts a loss of its own into the model")
    vocab = vocab_size or ASSUMED_VOCAB
    tokens = planned_tokens(cfg, hardware.lengths)
    rows = split_batch(cfg, hardware.world_size, has_gpu=bool(machine.gpus), row_tokens=tokens).rows
    scores_bytes = rows * tokens * vocab * 4
    size = format_bytes(scores_bytes) + ("" if vocab_size else f" at most, for a vocabulary of {vocab} or less")
    if machine.gpus and vocab > CHUNKED_WINS_VOCAB:
        return Decision("chunked", f"a vocabulary of {vocab} on a GPU: whole scores would crowd out the batch")
    if scores_bytes > LARGE_SCORES_BYTES:
        return Decision("chunked", f"whole scores of one micro-batch would take {size}")
    return Decision("standard", f"scores of one micro-batch take {size}; no recomputation needed")


def _compare_heads(cfg: RunConfig, shape: ModelShape, *, hardware: Hardware) -> tuple[RunConfig, Decision]:
    """Take whole scores unless chunks of them make room for a larger micro-batch, or for one at all."""
    seen, configs, tokens = {}, {}, planned_tokens(cfg, hardware.lengths)
    for head in ("standard", "chunked"):
        configs[head] = tried = cfg if cfg.train.loss_head == head else cfg.with_values({LOSS_HEAD: head}, "auto")
        estimate_for = foresight(tried, shape, hardware=hardware)
        split = split_batch(cfg, hardware.world_size, has_gpu=True, row_tokens=tokens, estimate_for=estimate_for)
        seen[head] = estimate_for(split.rows)
    whole, chunks = seen["standard"], seen["chunked"]
    if chunks.size.rows > whole.size.rows:
        sizes = f"{chunks.size.rows} rows a micro-batch instead of {whole.size.rows}"
        why = f"a vocabulary of {shape.vocab} in chunks leaves room for {sizes}"
        return configs["chunked"], Decision("chunked", why)
    if whole.verdict != "fits" and chunks.peak_bytes < whole.peak_bytes:
        saved = format_bytes(whole.peak_bytes - chunks.peak_bytes)
        return configs["chunked"], Decision("chunked", f"a vocabulary of {shape.vocab} in chunks takes {saved} less")
    why = "chunks would make room for no larger micro-batch, and compute scores twice"
    return configs["standard"], Decision("standard", why)
