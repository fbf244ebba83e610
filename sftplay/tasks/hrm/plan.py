"""Task hrm in the plan: what a run of puzzles costs, advice for it, and its words."""

from __future__ import annotations

from collections.abc import Iterator
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
)
from sftplay.units import format_bytes


def flops_per_row(shape: PuzzleModelShape) -> float:
    """Count the operations of a step on one row in products with weights.

    All calls run forward, those that learn backward, and all calls again where the worth of going on is learned. There
    the last block ends with one position alone.
    """
    puzzles, hrm = shape.puzzles, shape.puzzles.hrm
    passed = hrm.h_cycles * (hrm.l_cycles * hrm.l_layers + puzzles.slow_blocks)
    blocks = (1 + hrm.looks_ahead) * passed + 2 * puzzles.learned_blocks  # a backward pass is two forward passes
    products = puzzles.positions * (blocks * puzzles.block + 3 * hrm.hidden_size * puzzles.grid.words)
    spared = hrm.looks_ahead * (puzzles.positions - 1) * (puzzles.block - 3 * hrm.hidden_size**2)
    return float(2 * (products - spared))  # a multiplication and an addition a weight


def _list_steps(cfg: RunConfig, shape: PuzzleModelShape, *, sized: SizedRun) -> Iterator[Step]:
    hrm, forecast, processes = cfg.hrm, sized.forecast, sized.world_size
    assert forecast is not None

    def halves(size: int, *, least: int = 64, unit: int = 1) -> Iterator[int]:
        # A model or an embedding narrower than 64 is no advice.
        while size % 2 == 0 and size // 2 >= least and size // 2 % unit == 0:
            size //= 2
            yield size

    free = {key: "auto" for key in (BATCH_SIZE, GRAD_ACCUM) if cfg.get_value(key) != "auto"}
    is_whole = sized.cfg.hrm.puzzle_emb_placement == "replicated" and can_be_shared_out(shape, processes)
    changes: list[tuple[bool, dict[str, Any]]] = [
        (is_whole, {TABLE: "sharded"}),
        (bool(free), free),
        (hrm.loss_precision == "fp64", {"hrm.loss_precision": "fp32"}),
        (sized.cfg.train.precision == "fp32" and forecast.setting.device.has_bf16, {"train.precision": "bf16"}),
        (hrm.looks_ahead, {"hrm.q_continue": False}),
        (hrm.ema is not None, {"hrm.ema": None}),
        (hrm.grad == "full_last_cycle", {"hrm.grad": "one_step"}),
    ]
    yield from (step_to(values) for applies, values in changes if applies)
    for n in halves(cfg.train.effective_batch_size, least=processes, unit=processes):
        yield step_to({"train.effective_batch_size": n, **free})
    if can_be_shared_out(shape, 2):
        yield from (step_to({"hrm.puzzle_emb_dim": n}) for n in halves(hrm.embedding_size))
    unit = hrm.num_heads * (2 if hrm.positions == "rope" else 1)
    yield from (step_to({"hrm.hidden_size": n}) for n in halves(hrm.hidden_size, unit=unit))


KINDS = {
    "arc": GridSize(cells=900, words=12, identifiers=1_121_121, name="ARC, 30 x 30: 1120 tasks with 1000 copies each"),
    "maze": GridSize(cells=900, words=6, identifiers=1, name="mazes of 30 x 30"),
    "sudoku": GridSize(cells=81, words=11, identifiers=1, name="Sudoku, 9 x 9"),
}
"""What `make puzzle-data` makes, by its KIND; of ARC as many identifiers as ARC-AGI-2 has, the larger one: those of
1000 training and 120 evaluation tasks with AUG=1000, and the blank one."""


def shape_for_puzzles(cfg: RunConfig) -> PuzzleModelShape:
    """Find the shape of the config's model.

    Where there are no puzzles yet, their grid is assumed from the name of their folder, and the shape says so.

    Raises:
        ConfigError: there are no built-in puzzles of that name.
        DataError: the puzzles are not sound.
    """

    def is_there(path: str | None) -> bool:
        return path is not None and (path.startswith(BUILTIN) or Path(path).exists())

    path, val_path = cfg.rows_path, cfg.data.val_path
    if not is_there(path):
        kind = next((kind for kind in KINDS if kind in Path(path).name.lower()), "arc")
        assumed = f"{path} is not there yet: planned for {KINDS[kind].name}"
        return PuzzleModelShape.from_puzzles(PuzzleShape(cfg.hrm, KINDS[kind]), rows=None, assumed=assumed)
    facts = open_splits(path, val_path if is_there(val_path) else None)[0].facts
    across = " x ".join(map(str, facts.shape)) if facts.shape else f"{facts.seq_len} cells"
    name, identifiers = f"{facts.kind or Path(path).name}, {across}", facts.num_puzzle_identifiers
    grid = GridSize(cells=facts.seq_len, words=facts.vocab_size, identifiers=identifiers, name=name)
    rows = facts.total_groups * facts.mean_puzzle_examples
    return PuzzleModelShape.from_puzzles(PuzzleShape(cfg.hrm, grid), rows=rows)


class PuzzlePlan(TaskSizing, TaskReport):
    """All weights of a small model train; rows are grids of one size."""

    def where_model(self, cfg: RunConfig) -> str:
        return "hrm"

    def decide_more(self, cfg: RunConfig, machine: Machine) -> Decisions:
        if not machine.gpus:
            return {"hrm.compile": Decision(False, "on a CPU it costs more than a short run gets back")}
        problem = find_compiler_problem()
        return {"hrm.compile": Decision(not problem, problem or "faster steps on a GPU")}

    def size_whole(self, cfg: RunConfig, machine: Machine, *, shape: ModelShape, hardware: Hardware) -> SizedRun | None:
        """Take all rows of a process at once where memory allows it."""
        assert isinstance(shape, PuzzleModelShape)
        processes = hardware.world_size
        chosen = decide_numerics(cfg, machine) | self.decide_more(cfg, machine)
        chosen |= {
            BACKEND: Decision("bnb", "the model is the kit's own"),
            LOSS_HEAD: Decision("standard", "the vocabulary is that of a grid"),
            STRATEGY: Decision("ddp", "the model is small"),
        }
        chosen[TABLE] = choose_table(fill_open(cfg, chosen), shape, hardware=hardware)
        decided = fill_open(cfg, chosen)
        shape = shape.with_config(decided.hrm)
        forecast_rows = foresee_puzzles(decided, shape, hardware=hardware)
        tokens = {"row_tokens": shape.row_tokens, "most_tokens": PLATEAU_TOKENS}  # rows are alike: there is no padding
        split = split_batch(decided, processes, has_gpu=bool(machine.gpus), estimate_for=forecast_rows, **tokens)
        chosen |= {BATCH_SIZE: Decision(split.rows, split.reason), GRAD_ACCUM: Decision(split.accum, split.reason)}
        shown = ["train.precision", "train.learning_rate", BATCH_SIZE, GRAD_ACCUM]
        shown += [TABLE] if can_be_shared_out(shape, processes) else []
        notes = [*scaled_rate(cfg), *without_effect(cfg, machine)]
        if cfg.hrm.puzzle_emb_placement == "sharded" and processes == 1:
            notes.append(f"{TABLE} sharded has no effect with one process")
        notes += [shape.assumed] if shape.assumed else []
        decisions = {key: chosen[key] for key in shown if is_open(cfg, key)}
        return SizedRun(fill_open(decided, chosen), processes, decisions, tuple(notes), forecast_rows(split.rows))

    def known_shape(self, cfg: RunConfig) -> ModelShape | None:
        return shape_for_puzzles(cfg)

    def compiled(self, cfg: RunConfig) -> tuple[str, bool, str]:
        return "hrm.compile", bool(cfg.hrm.compile), "false"

    def suggest(self, cfg: RunConfig, sized: SizedRun, *, sizing: Sizing, hardware: Hardware) -> list[Suggestion]:
        """Suggest changes with which the run fits; where no single one does, several together, and none without need.

        `cfg` is as the user wrote it, with its `auto`.
        """
        assert sized.forecast is not None
        shape = sized.forecast.setting.shape
        assert isinstance(shape, PuzzleModelShape)
        steps = list(_list_steps(cfg, shape, sized=sizing(cfg, shape=shape)))

        def attempt(tried: list[Step]) -> Suggestion:
            values = {key: value for step in tried for key, value in step.values.items()}
            changed = cfg.with_values(values, "suggestion")
            found = sizing(changed, shape=shape.with_config(changed.hrm))
            seen = found.forecast
            assert seen is not None
            words = ", ".join(step.change for step in tried)
            return Suggestion(words, seen.peak_bytes, seen.verdict == "fits", int(found.cfg.train.batch_size))

        fitting: dict[frozenset[str], Suggestion] = {}
        for step in steps:
            if not any(step.values.keys() >= keys for keys in fitting) and (found := attempt([step])).fits:
                fitting[frozenset(step.values)] = found
        if fitting:
            return list(fitting.values())[:ENOUGH]
        combined: list[Step] = []
        for combined in added_up(steps):
            if attempt(combined).fits:
                break
        else:
            return [attempt(combined)] if combined else []
        # A change is left out where the others suffice, or else is as small as they allow.
        for step in reversed(combined):
            others = [other for other in combined if other is not step]
            milder = [[other] for other in steps if other.values.keys() == step.values.keys()]
            combined = next(tried for one in ([], *milder) if attempt(tried := [*others, *one]).fits)
        return [attempt(sorted(combined, key=steps.index))]

    def workload(self, cfg: RunConfig, seen: Forecast, *, lengths: RowLengths | None = None) -> Workload:
        """Count steps, disk and time of a run, evaluations left out."""
        shape, device, train = seen.setting.shape, seen.setting.device, cfg.train
        assert isinstance(shape, PuzzleModelShape)
        steps, reason = train.max_steps, "train.max_steps"
        if steps is None and shape.rows is not None:
            steps = int(cfg.hrm.epochs * shape.rows / train.effective_batch_size)
            reason = f"hrm.epochs, {shape.rows:.0f} rows an epoch"
        elif steps is None:
            reason = "the puzzles are not there yet"
        puzzles, processes = shape.puzzles, seen.setting.world_size
        result = 4 * (puzzles.weights + puzzles.table)
        state = seen.footprint.phases["segment"]["carry"] / 3 * processes
        checkpoint = int(result + 4 * puzzles.weights * (2 + bool(cfg.hrm.ema)) + state)
        disk = checkpoint * (train.save_total_limit + 1) + result
        if steps is None:
            return Workload(steps, reason, None, checkpoint, disk, None, "the number of steps is not known")
        rows, speed = steps * train.effective_batch_size, 0.0
        if not device.is_gpu:
            speed = CPU_FLOPS_PER_CORE * device.cores
            basis = f"{CPU_FLOPS_PER_CORE / 1e9:g} GFLOP/s a core assumed, without evaluations"
        elif device.tflops is not None:
            speed = device.tflops * 1e12 * USED_SHARE * processes
            basis = f"{USED_SHARE:.0%} of {device.tflops:g} TFLOP/s a GPU (data sheet), without evaluations"
        else:
            basis = f"the peak speed of {device.name} is not in the table"
        seconds = rows * flops_per_row(shape) / speed if speed else None
        return Workload(steps, reason, rows * shape.row_tokens, checkpoint, disk, seconds, basis)

    def compare(self, cfg: RunConfig, shape: ModelShape, *, hardware: Hardware) -> tuple[list[Any], Iterator[str]]:
        what = "task mode hrm trains every weight, and by ddp alone: there is nothing to compare"
        raise ConfigError(what, where="--compare (COMPARE=1)", fix="leave it out")

    def describe_tokens(self, cfg: RunConfig, planned: int) -> str:
        return f"grids of {planned} positions, their puzzle's embedding among them"

    def describe_sampling(self, seen: Forecast, plan: dict[str, Any]) -> Iterator[str]:
        """Yield the puzzle embeddings and what sharding saves; nothing where there is at most one."""
        shape, processes = seen.setting.shape, seen.setting.world_size
        if not isinstance(shape, PuzzleModelShape) or not can_be_shared_out(shape, 2):
            return
        puzzles = shape.puzzles
        whole, sharded = FP32 * puzzles.table, FP32 * puzzles.table_share(processes)
        yield f"table       {puzzles.grid.identifiers:,} puzzle embeddings of {puzzles.hrm.embedding_size} numbers"
        if processes == 1:
            yield f"            {format_bytes(whole)}; several processes could share it out"
            return
        saved = f"{format_bytes(whole)} whole, {format_bytes(sharded)} sharded: {format_bytes(whole - sharded)} less"
        here = "whole" if puzzles.held(processes) == puzzles.table else "sharded"
        yield f"            on each process {saved} ({here} here)"

    def describe_phases(self, seen: Forecast) -> Iterator[str]:
        return describe_phases(seen)


PLAN = PuzzlePlan()
