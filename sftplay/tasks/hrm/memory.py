"""The plan of a puzzle model: weights, shape, memory of a step, and where the puzzle embeddings lie."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from sftplay.config.run import RunConfig
from sftplay.plan.memory.forecast import Forecast, Hardware, Setting, forecast
from sftplay.plan.memory.memory_setup import BYTES, WORKSPACE_BYTES, MemorySetup, workspace_bytes
from sftplay.plan.memory.sharding import DeviceShare
from sftplay.plan.memory.step import Footprint, Size
from sftplay.plan.shape.model_shape import ModelShape
from sftplay.plan.sizing.decisions import Decision
from sftplay.tasks.hrm.section import HrmConfig, TablePlacement
from sftplay.units import format_bytes

MULTIPLE, SMALL_WIDTH, SMALL_MULTIPLE = 256, 512, 32
"""What the width of the feed-forward layers is rounded up to, and below which width to less."""


@dataclass(frozen=True, kw_only=True)
class GridSize:
    """What the puzzles decide of the model."""

    cells: int
    words: int
    """Tokens of the vocabulary."""

    identifiers: int
    """Rows of the table of puzzle embeddings."""

    name: str = "puzzles"


@dataclass(frozen=True)
class PuzzleShape:
    """A model's counts; all are weights or positions, never bytes."""

    hrm: HrmConfig
    grid: GridSize

    @property
    def inner(self) -> int:
        """Width within SwiGLU."""
        multiple = MULTIPLE if self.hrm.hidden_size >= SMALL_WIDTH else SMALL_MULTIPLE
        return math.ceil(round(self.hrm.expansion * self.hrm.hidden_size * 2 / 3) / multiple) * multiple

    @property
    def embedding(self) -> int:
        """Numbers in a puzzle's row of the table."""
        return self.hrm.hidden_size if self.hrm.puzzle_emb_dim is None else self.hrm.puzzle_emb_dim

    @property
    def positions(self) -> int:
        """Cells, and the places before them that hold the puzzle's embedding."""
        return (self.hrm.puzzle_emb_len or math.ceil(self.embedding / self.hrm.hidden_size)) + self.grid.cells

    @property
    def block(self) -> int:
        """Weights of a block: attention without biases, and SwiGLU."""
        return 4 * self.hrm.hidden_size**2 + 3 * self.hrm.hidden_size * self.inner

    @property
    def blocks(self) -> int:
        """Blocks that have weights of their own."""
        return self.hrm.l_layers + (self.hrm.h_layers if self.hrm.arch == "hrm" else 0)

    @property
    def blocks_of_slow(self) -> int:
        """Blocks that a call of the slow module goes through."""
        return self.hrm.h_layers if self.hrm.arch == "hrm" else self.hrm.l_layers

    @property
    def learned_blocks(self) -> int:
        """Blocks that a gradient goes back through in a segment: those of the last calls."""
        calls = 1 if self.hrm.grad == "one_step" else self.hrm.l_cycles
        return calls * self.hrm.l_layers + self.blocks_of_slow

    @property
    def passed_blocks(self) -> int:
        """Blocks that a segment goes through, with a gradient or without."""
        return self.hrm.h_cycles * (self.hrm.l_cycles * self.hrm.l_layers + self.blocks_of_slow)

    @property
    def weights(self) -> int:
        """What the optimizer trains: not the table, and not the two start states."""
        width = self.hrm.hidden_size
        places = self.positions if self.hrm.positions == "learned" else 0
        return self.blocks * self.block + (2 * self.grid.words + places) * width + 2 * width + 2

    @property
    def table(self) -> int:
        """Numbers in the table of puzzle embeddings."""
        return self.grid.identifiers * self.embedding

    def table_share(self, processes: int) -> int:
        """Numbers of that table on each of so many processes where it is sharded, empty places among them."""
        return math.ceil(self.grid.identifiers / processes) * self.embedding

    def held(self, processes: int) -> int:
        """Numbers of that table on each of so many processes."""
        return self.table_share(processes) if self.hrm.puzzle_emb_placement == "sharded" else self.table


@dataclass(frozen=True, kw_only=True)
class PuzzleModelShape(ModelShape):
    """A model of puzzles."""

    puzzles: PuzzleShape
    rows: float | None
    """Rows of an epoch, in which each group is visited once; None where the puzzles are not there yet."""

    assumed: str = ""
    """What was assumed of puzzles that are not there, as a note."""

    @cached_property
    def row_tokens(self) -> int:
        """Tokens of a row: cells, and the places of the puzzle's embedding."""
        return self.puzzles.positions

    def of(self, hrm: HrmConfig) -> PuzzleModelShape:
        """The shape of another model for the same puzzles."""
        return model_shape_of(PuzzleShape(hrm, self.puzzles.grid), rows=self.rows, assumed=self.assumed)


def model_shape_of(puzzles: PuzzleShape, *, rows: float | None, assumed: str = "") -> PuzzleModelShape:
    """The counts of a model of puzzles among those of language models. Its blocks are its layers."""
    hrm = puzzles.hrm
    return PuzzleModelShape(
        name=f"HRM for {puzzles.grid.name}",
        family="hrm",
        layers=puzzles.blocks,
        hidden=hrm.hidden_size,
        heads=hrm.num_heads,
        kv_heads=hrm.num_heads,
        head_dim=hrm.hidden_size // hrm.num_heads,
        mlp=puzzles.inner,
        vocab=puzzles.grid.words,
        max_positions=puzzles.positions,
        tied=False,
        gated_mlp=True,
        linears=(),
        layer_other_params=puzzles.block,
        other_params=puzzles.weights - puzzles.blocks * puzzles.block,
        norm="rms",
        norms_per_layer=2,
        qk_norm=False,
        activation="silu",
        parallel_block=False,
        softcap_final=False,
        softcap_attn=False,
        sliding_window=None,
        layer_pattern=1,
        experts=0,
        vision_params=0,
        unmodelled=(),
        puzzles=puzzles,
        rows=rows,
        assumed=assumed,
    )


FP32, FP64, INT64 = 4, 8, 8

NORM_INPUTS = 2
"""Inputs of the two norms of a block; they are kept in fp32."""

STREAMS, ROTATED = 6, 2
"""Of a block, in the type of the computation and as wide as the model: its input, queries, keys and values as one, the
output of attention, and the input of the feed-forward layer; queries and keys again where they are rotated."""

INNERS = 4
"""The two halves of SwiGLU, the activated one, and their product."""

NORM_MOMENT = 4
"""Tensors as wide as the model in the backward pass of a norm, in fp32."""

SCORES = 6
"""Copies of a segment's scores in the type of the loss, forward and backward."""


@dataclass(frozen=True, kw_only=True)
class PuzzleSize:
    """Rows of a process, and how many of them at a time."""

    rows: int
    micro_batch: int

    @property
    def accumulates(self) -> bool:
        """Whether a step has several micro-batches."""
        return self.micro_batch < self.rows


def puzzle_footprint(
    shape: PuzzleShape, *, size: PuzzleSize, compute_bytes: int, processes: int = 1, workspace: int = WORKSPACE_BYTES
) -> Footprint:
    """Bytes of every phase of one step on one device, in the steady state.

    `compute_bytes` are those of a number of the computation; `processes` exchange gradients. `workspace`
    is what cuBLAS takes, 0 without a GPU.
    """
    hrm, weights = shape.hrm, float(FP32 * shape.weights)
    tokens, at_once = (rows * shape.positions for rows in (size.rows, size.micro_batch))
    state = 2 * hrm.hidden_size * compute_bytes
    puzzles = 2 * size.rows * shape.grid.cells * INT64
    resident = _resident(shape, processes=processes, workspace=workspace)
    # The state before the step, the same with new puzzles in it, and what the micro-batches have made of it.
    carry = float(3 * tokens * state + 3 * puzzles)
    before = {
        **resident,
        "gradients": weights if size.accumulates else 0.0,
        "carry": carry,
        "activations": _kept(shape, tokens=at_once, compute_bytes=compute_bytes),
    }
    looks_ahead = hrm.q_continue and hrm.n_supervision > 1
    ahead = _running(shape, tokens=at_once * looks_ahead, compute_bytes=compute_bytes, streams=4)
    scores = _scores(shape, rows=size.micro_batch, compute_bytes=compute_bytes)
    phases = {
        "segment": {**before, "second pass": ahead, "head": scores},
        "layer": {**before, "layer": _undone(shape, tokens=at_once, compute_bytes=compute_bytes)},
        "step": {
            **resident,
            "gradients": weights,
            "carry": carry + tokens * state * size.accumulates,  # parts of it are put together
            "optimizer step": _optimizer_moment(shape),
        },
        "evaluation": {
            **resident,
            "average": resident["average"] * 2,  # the trained weights are put aside meanwhile
            "carry": float((tokens + at_once) * state + 2 * puzzles),
            "layer": _running(shape, tokens=at_once, compute_bytes=compute_bytes, streams=6),
        },
    }
    if (whole := collected_bytes(shape, processes)) and not workspace:
        # Only the main process collects, and all share one memory.
        phases["checkpoint"] = {**resident, "carry": carry, "collected table": whole / processes}
    return Footprint(phases)


def collected_bytes(shape: PuzzleShape, processes: int) -> float:
    """The whole table on the main process's host while it is written; 0 where each process has it anyway."""
    return float(FP32 * shape.table) if shape.held(processes) < shape.table else 0.0


def _resident(shape: PuzzleShape, *, processes: int, workspace: int) -> dict[str, float]:
    """What is held throughout."""
    weights = float(FP32 * shape.weights)
    return {
        "weights": weights + FP32 * 2 * shape.hrm.hidden_size,
        "table": float(FP32 * shape.held(processes)),
        "average": weights if shape.hrm.ema else 0.0,
        "optimizer": 2 * weights,
        "buckets and sharding": weights if processes > 1 else 0.0,
        "workspace": float(workspace),
    }


def _running(shape: PuzzleShape, *, tokens: int, compute_bytes: int, streams: int) -> float:
    """A pass without gradients in its fullest moment: within SwiGLU, beside so many tensors as wide as the model."""
    token = INNERS * shape.inner + streams * shape.hrm.hidden_size
    return float(compute_bytes * tokens * token) + _rounded(shape, compute_bytes)


def _scores(shape: PuzzleShape, *, rows: int, compute_bytes: int) -> float:
    """The states of the cells as the head reads them, their scores, and these in the type of the loss."""
    cell = compute_bytes * (shape.hrm.hidden_size + shape.grid.words)
    loss_bytes = FP64 if shape.hrm.loss_precision == "fp64" else FP32
    return float(rows * shape.grid.cells * (cell + SCORES * loss_bytes * shape.grid.words))


def _kept(shape: PuzzleShape, *, tokens: int, compute_bytes: int) -> float:
    """What a segment keeps for its backward pass."""
    hrm = shape.hrm
    streams = STREAMS + (ROTATED if hrm.positions == "rope" else 0)
    token = compute_bytes * (streams * hrm.hidden_size + INNERS * shape.inner)
    token += FP32 * (NORM_INPUTS * hrm.hidden_size + hrm.num_heads + NORM_INPUTS)
    return shape.learned_blocks * (tokens * token + _rounded(shape, compute_bytes))


def _undone(shape: PuzzleShape, *, tokens: int, compute_bytes: int) -> float:
    """What the backward pass of the last block adds to all that is kept: in SwiGLU, whose product and whose norm's
    input are no longer needed then, or in a norm, where everything is fp32."""
    width = shape.hrm.hidden_size
    in_feed_forward = compute_bytes * (2 * shape.inner + width) - FP32 * width
    return float(tokens * max(in_feed_forward, NORM_MOMENT * FP32 * width))


def _rounded(shape: PuzzleShape, compute_bytes: int) -> float:
    """A block's weights in the type of the computation, made anew in each call; the weights themselves are fp32."""
    return float(compute_bytes * shape.block) if compute_bytes < FP32 else 0.0


def _optimizer_moment(shape: PuzzleShape) -> float:
    """What the optimizer makes for itself: fused AdamW nothing, AdamATan2 four copies of the largest weight."""
    largest = 2 * shape.hrm.hidden_size * shape.inner
    return float(FP32 * 4 * largest) if shape.hrm.optim == "adam_atan2" else 0.0


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
        footprint = puzzle_footprint(
            shape.puzzles,
            size=PuzzleSize(rows=self.rows, micro_batch=size.rows),
            compute_bytes=int(setting.execution.compute_bytes),
            processes=processes,
            workspace=workspace_bytes(device.capability) if device.is_gpu else 0,
        )
        on_host = round(collected_bytes(shape.puzzles, processes)) if device.is_gpu else 0
        return Forecast(setting, size, footprint, on_host)


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

VERDICTS = ("does_not_fit", "tight", "fits")


def can_be_shared_out(shape: PuzzleModelShape, processes: int) -> bool:
    """Whether a process would hold fewer rows than there are."""
    return processes > 1 and shape.puzzles.table > shape.puzzles.embedding


def choose_table(cfg: RunConfig, shape: PuzzleModelShape, *, hardware: Hardware) -> Decision:
    """`replicated` or `sharded`, for a config in which all but the sizes is decided."""
    if not can_be_shared_out(shape, hardware.world_size):
        return Decision("replicated", "there is nothing to share out")
    whole, shared = (_fewest_rows(cfg, shape, hardware=hardware, placement=each) for each in ("replicated", "sharded"))
    filled = f"{format_bytes(whole.peak_bytes)} of {format_bytes(whole.budget_bytes)}"
    if VERDICTS.index(shared.verdict) > VERDICTS.index(whole.verdict):
        return Decision("sharded", f"with a whole table on each process even the fewest rows take {filled}")
    if whole.verdict == "fits":
        return Decision("replicated", "a whole table on each process fits, and needs no exchange of rows")
    return Decision("replicated", f"even the fewest rows take {filled}, and sharding alone would not change that")


def _fewest_rows(cfg: RunConfig, shape: PuzzleModelShape, *, hardware: Hardware, placement: TablePlacement) -> Forecast:
    """The forecast of the smallest micro-batch that the config allows."""
    share, train = cfg.train.effective_batch_size // hardware.world_size, cfg.train
    given = train.batch_size if isinstance(train.batch_size, int) else None
    if given is None and isinstance(train.grad_accum, int):
        given = share // train.grad_accum
    tried = cfg.with_values({TABLE: placement}, "placement")
    return foresee_puzzles(tried, shape.of(tried.hrm), hardware=hardware)(given or 1)


def note_on_table(cfg: RunConfig, processes: int) -> tuple[str, ...]:
    """A note where sharding was asked for and there is nobody to share with."""
    if cfg.hrm.puzzle_emb_placement == "sharded" and processes == 1:
        return (f"{TABLE} sharded has no effect with one process",)
    return ()
