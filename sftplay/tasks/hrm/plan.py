"""Task hrm in the plan: the memory of a step, what a run of puzzles costs, advice, and its words."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from sftplay.config.cluster import BACKEND
from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError
from sftplay.machine.probe import Machine, find_compiler_problem
from sftplay.plan.advice import ENOUGH, Step, Suggestion, added_up, step_to
from sftplay.plan.forecast import DeviceShare, Footprint, Forecast, Hardware, RowLengths, Setting, Size, forecast
from sftplay.plan.memory_setup import BYTES, WORKSPACE_BYTES, MemorySetup, workspace_bytes
from sftplay.plan.report import CPU_FLOPS_PER_CORE, USED_SHARE, Sizing, TaskReport, Workload, describe_phases
from sftplay.plan.shape import ModelShape
from sftplay.plan.sizing import (
    BATCH_SIZE,
    GRAD_ACCUM,
    LOSS_HEAD,
    PLATEAU_TOKENS,
    STRATEGY,
    Decision,
    Decisions,
    SizedRun,
    TaskSizing,
    decide_numerics,
    fill_open,
    is_open,
    scaled_rate,
    split_batch,
    without_effect,
)
from sftplay.tasks.hrm.puzzles.sampler import BUILTIN, open_splits
from sftplay.tasks.hrm.section import HrmConfig
from sftplay.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class GridSize:
    """What the puzzles decide of the model: cells, tokens of the vocabulary, rows of the table of embeddings."""

    cells: int
    words: int
    identifiers: int
    name: str = "puzzles"


@dataclass(frozen=True)
class PuzzleShape:
    """A model's counts; all are weights or positions, never bytes."""

    hrm: HrmConfig
    grid: GridSize

    @property
    def positions(self) -> int:
        """Cells, and the places before them that hold the puzzle's embedding."""
        return self.hrm.prefix_len + self.grid.cells

    @property
    def block(self) -> int:
        """Weights of a block: attention without biases, and SwiGLU."""
        return 4 * self.hrm.hidden_size**2 + 3 * self.hrm.hidden_size * self.hrm.inner_size

    @property
    def blocks(self) -> int:
        """Blocks that have weights of their own."""
        return self.hrm.l_layers + (self.hrm.h_layers if self.hrm.arch == "hrm" else 0)

    @property
    def slow_blocks(self) -> int:
        """Blocks that a call of the slow module goes through."""
        return self.hrm.h_layers if self.hrm.arch == "hrm" else self.hrm.l_layers

    @property
    def learned_blocks(self) -> int:
        """Blocks that a gradient goes back through in a segment: those of the last calls."""
        calls = 1 if self.hrm.grad == "one_step" else self.hrm.l_cycles
        return calls * self.hrm.l_layers + self.slow_blocks

    @property
    def weights(self) -> int:
        """The count that the optimizer trains: without the table and the two start states."""
        width = self.hrm.hidden_size
        places = self.positions if self.hrm.positions == "learned" else 0
        return self.blocks * self.block + (2 * self.grid.words + places) * width + 2 * width + 2

    @property
    def table(self) -> int:
        """Numbers in the table of puzzle embeddings."""
        return self.grid.identifiers * self.hrm.embedding_size

    def table_share(self, processes: int) -> int:
        """Count the table's numbers on each of so many processes where it is sharded, empty places among them."""
        return math.ceil(self.grid.identifiers / processes) * self.hrm.embedding_size

    def held(self, processes: int) -> int:
        """Count the table's numbers on each of so many processes."""
        return self.table_share(processes) if self.hrm.puzzle_emb_placement == "sharded" else self.table


@dataclass(frozen=True, kw_only=True)
class PuzzleModelShape(ModelShape):
    """A model of puzzles, among language models. Its blocks are its layers."""

    puzzles: PuzzleShape
    rows: float | None
    """Rows of an epoch, in which each group is visited once; None where the puzzles are not there yet."""

    assumed: str = ""
    """What was assumed of puzzles that are not there, as a note."""

    @classmethod
    def from_puzzles(cls, puzzles: PuzzleShape, *, rows: float | None, assumed: str = "") -> PuzzleModelShape:
        """Write the counts of a model of puzzles as those of a language model."""
        hrm, heads = puzzles.hrm, puzzles.hrm.num_heads
        return cls(
            name=f"HRM for {puzzles.grid.name}", family="hrm", layers=puzzles.blocks, hidden=hrm.hidden_size,
            heads=heads, kv_heads=heads, head_dim=hrm.hidden_size // heads, mlp=hrm.inner_size,
            vocab=puzzles.grid.words, max_positions=puzzles.positions, tied=False, gated_mlp=True, linears=(),
            layer_other_params=puzzles.block, other_params=puzzles.weights - puzzles.blocks * puzzles.block,
            norm="rms", norms_per_layer=2, qk_norm=False, activation="silu", parallel_block=False,
            softcap_final=False, softcap_attn=False, sliding_window=None, layer_pattern=1, experts=0, vision_params=0,
            unmodelled=(), puzzles=puzzles, rows=rows, assumed=assumed,
        )  # fmt: skip

    @cached_property
    def row_tokens(self) -> int:
        """Tokens of a row: cells, and the places of the puzzle's embedding."""
        return self.puzzles.positions

    def with_config(self, hrm: HrmConfig) -> PuzzleModelShape:
        """Return the shape of another model for the same puzzles."""
        return self.from_puzzles(PuzzleShape(hrm, self.puzzles.grid), rows=self.rows, assumed=self.assumed)


FP32, FP64, INT64 = 4, 8, 8


def puzzle_footprint(
    shape: PuzzleShape,
    *,
    rows: int,
    micro_batch: int,
    compute_bytes: int,
    processes: int = 1,
    workspace: int = WORKSPACE_BYTES,
) -> Footprint:
    """Return the bytes of every phase of one step on one device, in the steady state.

    `rows` are those of a process, `micro_batch` of them at a time. `compute_bytes` are those of a number of the
    computation; `processes` exchange gradients. `workspace` is what cuBLAS takes, 0 without a GPU.
    """
    hrm, weights = shape.hrm, float(FP32 * shape.weights)
    width, inner, accumulates = hrm.hidden_size, hrm.inner_size, micro_batch < rows
    tokens, at_once = rows * shape.positions, micro_batch * shape.positions
    state, puzzles = 2 * width * compute_bytes, 2 * rows * shape.grid.cells * INT64
    average = weights if hrm.ema else 0.0
    resident = {
        "weights": weights + FP32 * 2 * width,
        "table": float(FP32 * shape.held(processes)),
        "average": average,
        "optimizer": 2 * weights,
        "buckets and sharding": weights if processes > 1 else 0.0,
        "workspace": float(workspace),
    }
    # A block's weights in the type of the computation, made anew in each call; the weights themselves are fp32.
    rounded = float(compute_bytes * shape.block) if compute_bytes < FP32 else 0.0
    # Kept of a block, in the type of the computation and as wide as the model: its input, queries, keys and values as
    # one, the output of attention, and the input of the feed-forward layer; queries and keys again where they are
    # rotated. As wide as SwiGLU: both halves, the activated one, and their product. In fp32: the inputs of two norms.
    streams = 6 + (2 if hrm.positions == "rope" else 0)
    kept = compute_bytes * (streams * width + 4 * inner) + FP32 * (2 * width + hrm.num_heads + 2)
    # The state before the step, the same with new puzzles in it, and what the micro-batches have made of it.
    carry = float(3 * tokens * state + 3 * puzzles)
    before = {
        **resident,
        "gradients": weights if accumulates else 0.0,
        "carry": carry,
        "activations": shape.learned_blocks * (at_once * kept + rounded),
    }

    def forward_bytes(tokens: int, streams: int) -> float:
        # A pass without gradients in its fullest moment: within SwiGLU, and so many tensors as wide as the model.
        return float(compute_bytes * tokens * (4 * inner + streams * width)) + rounded

    # The states of the cells as the head reads them, their scores, and six copies of these in the type of the loss,
    # forward and backward.
    loss_bytes = FP64 if hrm.loss_precision == "fp64" else FP32
    cell = compute_bytes * (width + shape.grid.words) + 6 * loss_bytes * shape.grid.words
    # The backward pass of the last block adds to all that is kept: in SwiGLU, whose product and whose norm's input are
    # no longer needed then, or in a norm, which has four tensors in fp32.
    undone = max(compute_bytes * (2 * inner + width) - FP32 * width, 4 * FP32 * width)
    phases = {
        "segment": {
            **before,
            "second pass": forward_bytes(at_once * hrm.looks_ahead, streams=4),
            "head": float(micro_batch * shape.grid.cells * cell),
        },
        "layer": {**before, "layer": float(at_once * undone)},
        "step": {
            **resident,
            "gradients": weights,
            "carry": carry + tokens * state * accumulates,  # parts of it are put together
            # Fused AdamW makes nothing for itself, AdamATan2 four copies of the largest weight.
            "optimizer step": float(FP32 * 4 * 2 * width * inner) if hrm.optim == "adam_atan2" else 0.0,
        },
        "evaluation": {
            **resident,
            "average": average * 2,  # the trained weights are put aside meanwhile
            "carry": float((tokens + at_once) * state + 2 * puzzles),
            "layer": forward_bytes(at_once, streams=6),
        },
    }
    if shape.held(processes) < shape.table and not workspace:
        # Only the main process collects, and all share one memory.
        phases["checkpoint"] = {**resident, "carry": carry, "collected table": FP32 * shape.table / processes}
    return Footprint(phases)


@dataclass(frozen=True, kw_only=True)
class PuzzleMemory:
    """The memory of a step of puzzles."""

    rows: int
    """Rows of a process in a step; each keeps its state."""

    learners: ClassVar[int] = 1
    labels: ClassVar[Mapping[str, str]] = {
        "table": "puzzle embeddings",
        "collected table": "all of them, to be written",
        "average": "averaged weights",
        "carry": "states between segments",
        "second pass": "a look at the next segment",
        "segment": "while a segment runs forward",
        "evaluation": "in the evaluation",
        "checkpoint": "while a checkpoint is written",
    }

    def forecast(self, setting: Setting, size: Size, *, sampled: int, share: DeviceShare) -> Forecast:
        """Forecast a step with micro-batches of `size`; nothing is sampled, and the model is split in no other way."""
        shape, device, processes = setting.shape, setting.device, setting.world_size
        assert isinstance(shape, PuzzleModelShape)
        puzzles = shape.puzzles
        footprint = puzzle_footprint(
            puzzles,
            rows=self.rows,
            micro_batch=size.rows,
            compute_bytes=int(setting.execution.compute_bytes),
            processes=processes,
            workspace=workspace_bytes(device.capability) if device.is_gpu else 0,
        )
        # The main process collects a sharded table on its host.
        collects = device.is_gpu and puzzles.held(processes) < puzzles.table
        return Forecast(setting, size, footprint, FP32 * puzzles.table if collects else 0)


def foresee_puzzles(cfg: RunConfig, shape: PuzzleModelShape, *, hardware: Hardware) -> Callable[[int], Forecast]:
    """Return the forecast of a micro-batch of so many rows, for a config in which all but the sizes is decided."""
    compute, share = BYTES[str(cfg.train.precision)], cfg.train.effective_batch_size // hardware.world_size
    setting = Setting(
        shape=shape,
        execution=MemorySetup(weight_bytes=4, compute_bytes=compute, stream_bytes=compute, checkpointing=False),
        device=hardware.device,
        strategy="ddp" if hardware.world_size > 1 else "single",
        world_size=hardware.world_size,
        task=PuzzleMemory(rows=share),
    )
    return lambda rows: forecast(setting, Size(rows=rows, seq=shape.row_tokens, accumulates=rows < share))


TABLE = "hrm.puzzle_emb_placement"


def can_be_shared_out(shape: PuzzleModelShape, processes: int) -> bool:
    """Whether a process would hold fewer rows than there are."""
    return processes > 1 and shape.puzzles.grid.identifiers > 1 and shape.puzzles.table > 0


def choose_table(cfg: RunConfig, shape: PuzzleModelShape, *, hardware: Hardware) -> Decision:
    """Choose `replicated` or `sharded`, for a config in which all but the sizes is decided."""
    if not can_be_shared_out(shape, hardware.world_size):
        return Decision("replicated", "there is nothing to share out")
    train, share = cfg.train, cfg.train.effective_batch_size // hardware.world_size
    # The smallest micro-batch that the config allows.
    rows = share // train.grad_accum if isinstance(train.grad_accum, int) else 1
    rows = train.batch_size if isinstance(train.batch_size, int) else rows
    whole, shared = (
        foresee_puzzles(tried, shape.with_config(tried.hrm), hardware=hardware)(rows or 1)
        for tried in (cfg.with_values({TABLE: value}, "placement") for value in ("replicated", "sharded"))
    )
    filled = f"{format_bytes(whole.peak_bytes)} of {format_bytes(whole.budget_bytes)}"
    verdicts = ("does_not_fit", "tight", "fits")
    if verdicts.index(shared.verdict) > verdicts.index(whole.verdict):
        return Decision("sharded", f"with a whole table on each process even the fewest rows take {filled}")
    if whole.verdict == "fits":
        return Decision("replicated", "a whole table on each process fits, and needs no exchange of rows")
    return Decision("replicated", f"even the fewest rows take {filled}, and sharding alone would not change that")


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

    def known_shape(self, cfg: RunConfig) -> PuzzleModelShape:
        """Find the shape of the config's model.

        Where there are no puzzles yet, their grid is assumed from the name of their folder, and the shape says so.
        Raise ConfigError where there are no built-in puzzles of that name, DataError where the puzzles are not sound.
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
