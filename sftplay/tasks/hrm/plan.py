"""Task hrm in the plan: what a run of puzzles costs, advice for it, and its words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sftplay.config.cluster import BACKEND
from sftplay.config.run import RunConfig
from sftplay.data.puzzles.find import BUILTIN, open_splits
from sftplay.errors import ConfigError
from sftplay.machine.libraries import find_compiler_problem
from sftplay.machine.probe import Machine
from sftplay.plan.memory.forecast import Forecast, Hardware
from sftplay.plan.memory.row_lengths import RowLengths
from sftplay.plan.report.advice import ENOUGH, Step, Suggestion, added_up, step_to
from sftplay.plan.report.run_cost import CPU_FLOPS_PER_CORE, USED_SHARE, Workload
from sftplay.plan.report.tables import describe_phases
from sftplay.plan.report.task_report import Sizing, TaskReport
from sftplay.plan.shape.model_shape import ModelShape
from sftplay.plan.sizing.decisions import Decision, Decisions, decide_numerics, scaled_rate, without_effect
from sftplay.plan.sizing.placement import STRATEGY
from sftplay.plan.sizing.size_run import BATCH_SIZE, GRAD_ACCUM, LOSS_HEAD, fill_open, is_open
from sftplay.plan.sizing.split import PLATEAU_TOKENS, split_batch
from sftplay.plan.sizing.task_sizing import SizedRun, TaskSizing
from sftplay.tasks.hrm.memory import (
    FP32,
    TABLE,
    GridSize,
    PuzzleModelShape,
    PuzzleShape,
    can_be_shared_out,
    choose_table,
    foresee_puzzles,
    model_shape_of,
    note_on_table,
)
from sftplay.units import format_bytes


def describe_table(seen: Forecast) -> Iterator[str]:
    """The puzzle embeddings and what sharding saves; nothing where there is at most one."""
    shape, processes = seen.setting.shape, seen.setting.world_size
    if not isinstance(shape, PuzzleModelShape) or shape.puzzles.table <= shape.puzzles.embedding:
        return
    puzzles = shape.puzzles
    whole, held = (FP32 * step for step in (puzzles.table, puzzles.held(processes)))
    yield f"table       {puzzles.grid.identifiers:,} puzzle embeddings of {puzzles.embedding} numbers"
    sharded = FP32 * puzzles.table_share(processes)
    if processes == 1:
        yield f"            {format_bytes(whole)}; several processes could share it out"
        return
    saved = f"{format_bytes(whole)} whole, {format_bytes(sharded)} sharded: {format_bytes(whole - sharded)} less"
    yield f"            on each process {saved} ({'whole' if held == whole else 'sharded'} here)"


MULTIPLY_ADD, BACKWARD = 2, 2
"""Operations a weight and position; backward passes over forward passes."""


def flops_per_row(shape: PuzzleModelShape) -> float:
    """Operations of a step on one row in products with weights: all calls forward, those that learn backward, and all
    calls again where the worth of going on is learned. There the last block ends with one position alone."""
    puzzles, hrm = shape.puzzles, shape.puzzles.hrm
    looks_ahead = hrm.q_continue and hrm.n_supervision > 1
    blocks = (1 + looks_ahead) * puzzles.passed_blocks + BACKWARD * puzzles.learned_blocks
    products = puzzles.positions * (blocks * puzzles.block + 3 * hrm.hidden_size * puzzles.grid.words)
    spared = looks_ahead * (puzzles.positions - 1) * (puzzles.block - 3 * hrm.hidden_size**2)
    return float(MULTIPLY_ADD * (products - spared))


def workload_of_puzzles(cfg: RunConfig, seen: Forecast) -> Workload:
    """Steps, disk and time of a run, evaluations left out."""
    shape, device, train = seen.setting.shape, seen.setting.device, cfg.train
    assert isinstance(shape, PuzzleModelShape)
    steps, reason = train.max_steps, "train.max_steps"
    if steps is None and shape.rows is not None:
        steps = int(cfg.hrm.epochs * shape.rows / train.effective_batch_size)
        reason = f"hrm.epochs, {shape.rows:.0f} rows an epoch"
    elif steps is None:
        reason = "the puzzles are not there yet"
    puzzles = shape.puzzles
    result = 4 * (puzzles.weights + puzzles.table)
    state = seen.footprint.phases["segment"]["carry"] / 3 * seen.setting.world_size
    checkpoint = int(result + 4 * puzzles.weights * (2 + bool(cfg.hrm.ema)) + state)
    disk = checkpoint * (train.save_total_limit + 1) + result
    if steps is None:
        return Workload(steps, reason, None, checkpoint, disk, None, "the number of steps is not known")
    work = steps * train.effective_batch_size * flops_per_row(shape)
    tokens = steps * train.effective_batch_size * shape.row_tokens
    if device.is_gpu and device.tflops is None:
        basis = f"the peak speed of {device.name} is not in the table"
        return Workload(steps, reason, tokens, checkpoint, disk, None, basis)
    if device.is_gpu and device.tflops is not None:
        speed = device.tflops * 1e12 * USED_SHARE * seen.setting.world_size
        basis = f"{USED_SHARE:.0%} of {device.tflops:g} TFLOP/s a GPU (data sheet), without evaluations"
    else:
        speed = CPU_FLOPS_PER_CORE * device.cores
        basis = f"{CPU_FLOPS_PER_CORE / 1e9:g} GFLOP/s a core assumed, without evaluations"
    return Workload(steps, reason, tokens, checkpoint, disk, work / speed, basis)


EFFECTIVE, EMBEDDING, WIDTH = "train.effective_batch_size", "hrm.puzzle_emb_dim", "hrm.hidden_size"

NARROWEST = 64
"""Width of the model and of the puzzle embeddings below which less is no advice."""


def suggest_for_puzzles(cfg: RunConfig, shape: PuzzleModelShape, *, sizing: Sizing) -> list[Suggestion]:
    """Changes with which the run fits; where no single one does, several together, and none of them without need.

    `cfg` is as the user wrote it, with its `auto`.
    """
    steps = list(_steps(cfg, shape, sized=sizing(cfg, shape=shape)))

    def attempt(tried: list[Step]) -> Suggestion:
        return _attempt(cfg, shape, steps=tried, sizing=sizing)

    fitting: dict[frozenset[str], Suggestion] = {}
    for step in steps:
        if not any(step.values.keys() >= keys for keys in fitting) and (found := attempt([step])).fits:
            fitting[frozenset(step.values)] = found
    if fitting:
        return list(fitting.values())[:ENOUGH]
    combined: list[Step] = []
    for combined in added_up(steps):
        if attempt(combined).fits:
            return [attempt(_mildest(combined, steps, fits=lambda tried: attempt(tried).fits))]
    return [attempt(combined)] if combined else []


def _mildest(combined: list[Step], steps: list[Step], *, fits: Callable[[list[Step]], bool]) -> list[Step]:
    """Changes that fit, each left out where the others suffice, or else as small as they allow."""
    for step in reversed(combined):
        others = [other for other in combined if other is not step]
        milder = [[other] for other in steps if other.values.keys() == step.values.keys()]
        combined = next(tried for one in ([], *milder) if fits(tried := [*others, *one]))
    return sorted(combined, key=steps.index)


def _attempt(cfg: RunConfig, shape: PuzzleModelShape, *, steps: list[Step], sizing: Sizing) -> Suggestion:
    changed = cfg.with_values({key: value for step in steps for key, value in step.values.items()}, "suggestion")
    sized = sizing(changed, shape=shape.of(changed.hrm))
    seen = sized.forecast
    assert seen is not None
    rows = int(sized.cfg.train.batch_size)
    return Suggestion(", ".join(step.change for step in steps), seen.peak_bytes, seen.verdict == "fits", rows)


def _steps(cfg: RunConfig, shape: PuzzleModelShape, *, sized: SizedRun) -> Iterator[Step]:
    hrm, forecast, processes = cfg.hrm, sized.forecast, sized.world_size
    assert forecast is not None
    if sized.cfg.hrm.puzzle_emb_placement == "replicated" and can_be_shared_out(shape, processes):
        yield step_to({TABLE: "sharded"})
    free = {key: "auto" for key in (BATCH_SIZE, GRAD_ACCUM) if cfg.get_value(key) != "auto"}
    if free:
        yield step_to(free)
    if hrm.loss_precision == "fp64":
        yield step_to({"hrm.loss_precision": "fp32"})
    if sized.cfg.train.precision == "fp32" and forecast.setting.device.has_bf16:
        yield step_to({"train.precision": "bf16"})
    if hrm.q_continue and hrm.n_supervision > 1:
        yield step_to({"hrm.q_continue": False})
    if hrm.ema is not None:
        yield step_to({"hrm.ema": None})
    if hrm.grad == "full_last_cycle":
        yield step_to({"hrm.grad": "one_step"})
    batches = _halves(cfg.train.effective_batch_size, least=processes, unit=processes)
    yield from (step_to({EFFECTIVE: n, **free}) for n in batches)
    if can_be_shared_out(shape, 2):
        yield from (step_to({EMBEDDING: n}) for n in _halves(shape.puzzles.embedding, least=NARROWEST))
    unit = hrm.num_heads * (2 if hrm.positions == "rope" else 1)
    yield from (step_to({WIDTH: n}) for n in _halves(hrm.hidden_size, least=NARROWEST, unit=unit))


def _halves(size: int, *, least: int, unit: int = 1) -> Iterator[int]:
    while size % 2 == 0 and size // 2 >= least and size // 2 % unit == 0:
        size //= 2
        yield size


def _decide_compile(machine: Machine) -> Decision:
    """Whether torch.compile pays."""
    if not machine.gpus:
        return Decision(False, "on a CPU it costs more than a short run gets back")
    problem = find_compiler_problem()
    return Decision(not problem, problem or "faster steps on a GPU")


KINDS = {
    "arc": GridSize(cells=900, words=12, identifiers=1_121_121, name="ARC, 30 x 30: 1120 tasks with 1000 copies each"),
    "maze": GridSize(cells=900, words=6, identifiers=1, name="mazes of 30 x 30"),
    "sudoku": GridSize(cells=81, words=11, identifiers=1, name="Sudoku, 9 x 9"),
}
"""What `make puzzle-data` makes, by its KIND; of ARC as many identifiers as ARC-AGI-2 has, the larger one: those of
1000 training and 120 evaluation tasks with AUG=1000, and the blank one."""


def shape_for_puzzles(cfg: RunConfig) -> PuzzleModelShape:
    """The shape of the config's model.

    Where there are no puzzles yet, their grid is assumed from the name of their folder, and the shape says so.

    Raises:
        ConfigError: there are no built-in puzzles of that name.
        DataError: the puzzles are not sound.
    """
    path = cfg.rows_path
    if not path.startswith(BUILTIN) and not Path(path).exists():
        kind = next((kind for kind in KINDS if kind in Path(path).name.lower()), "arc")
        assumed = f"{path} is not there yet: planned for {KINDS[kind].name}"
        return model_shape_of(PuzzleShape(cfg.hrm, KINDS[kind]), rows=None, assumed=assumed)
    val_path = cfg.data.val_path
    is_there = val_path is not None and (val_path.startswith(BUILTIN) or Path(val_path).exists())
    facts = open_splits(path, val_path if is_there else None)[0].facts
    across = " x ".join(map(str, facts.shape)) if facts.shape else f"{facts.seq_len} cells"
    grid = GridSize(
        cells=facts.seq_len,
        words=facts.vocab_size,
        identifiers=facts.num_puzzle_identifiers,
        name=f"{facts.kind or Path(path).name}, {across}",
    )
    return model_shape_of(PuzzleShape(cfg.hrm, grid), rows=facts.total_groups * facts.mean_puzzle_examples)


class PuzzlePlan(TaskSizing, TaskReport):
    """All weights of a small model train; rows are grids of one size."""

    def where_model(self, cfg: RunConfig) -> str:
        return "hrm"

    def decide_more(self, cfg: RunConfig, machine: Machine) -> Decisions:
        return {"hrm.compile": _decide_compile(machine)}

    def size_whole(self, cfg: RunConfig, machine: Machine, *, shape: ModelShape, hardware: Hardware) -> SizedRun | None:
        """All rows of a process go at once where memory allows it."""
        assert isinstance(shape, PuzzleModelShape)
        chosen = decide_numerics(cfg, machine) | self.decide_more(cfg, machine)
        chosen |= {
            BACKEND: Decision("bnb", "the model is the kit's own"),
            LOSS_HEAD: Decision("standard", "the vocabulary is that of a grid"),
            STRATEGY: Decision("ddp", "the model is small"),
        }
        chosen[TABLE] = choose_table(fill_open(cfg, chosen), shape, hardware=hardware)
        decided = fill_open(cfg, chosen)
        shape = shape.of(decided.hrm)
        look = foresee_puzzles(decided, shape, hardware=hardware)
        tokens = {"row_tokens": shape.row_tokens, "most_tokens": PLATEAU_TOKENS}  # rows are alike: there is no padding
        split = split_batch(decided, hardware.world_size, has_gpu=bool(machine.gpus), estimate_for=look, **tokens)
        chosen |= {BATCH_SIZE: Decision(split.rows, split.reason), GRAD_ACCUM: Decision(split.accum, split.reason)}
        told = ["train.precision", "train.learning_rate", BATCH_SIZE, GRAD_ACCUM]
        told += [TABLE] if can_be_shared_out(shape, hardware.world_size) else []
        notes = [*scaled_rate(cfg), *without_effect(cfg, machine), *note_on_table(cfg, hardware.world_size)]
        notes += [shape.assumed] if shape.assumed else []
        return SizedRun(
            fill_open(decided, chosen),
            hardware.world_size,
            {key: chosen[key] for key in told if is_open(cfg, key)},
            tuple(notes),
            look(split.rows),
        )

    def known_shape(self, cfg: RunConfig) -> ModelShape | None:
        return shape_for_puzzles(cfg)

    def compiled(self, cfg: RunConfig) -> tuple[str, bool, str]:
        return "hrm.compile", bool(cfg.hrm.compile), "false"

    def suggest(self, cfg: RunConfig, sized: SizedRun, *, sizing: Sizing, hardware: Hardware) -> list[Suggestion]:
        assert sized.forecast is not None
        shape = sized.forecast.setting.shape
        assert isinstance(shape, PuzzleModelShape)
        return suggest_for_puzzles(cfg, shape, sizing=sizing)

    def workload(self, cfg: RunConfig, seen: Forecast, *, lengths: RowLengths | None = None) -> Workload:
        return workload_of_puzzles(cfg, seen)

    def compare(self, cfg: RunConfig, shape: ModelShape, *, hardware: Hardware) -> tuple[list[Any], Iterator[str]]:
        what = "task mode hrm trains every weight, and by ddp alone: there is nothing to compare"
        raise ConfigError(what, where="--compare (COMPARE=1)", fix="leave it out")

    def describe_tokens(self, cfg: RunConfig, planned: int) -> str:
        return f"grids of {planned} positions, their puzzle's embedding among them"

    def describe_sampling(self, seen: Forecast, plan: dict[str, Any]) -> Iterator[str]:
        return describe_table(seen)

    def describe_phases(self, seen: Forecast) -> Iterator[str]:
        return describe_phases(seen)


PLAN = PuzzlePlan()
