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
