"""The model of puzzles in the form that plans of all models have, so that its plan reads like theirs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from sftplay.config.schema.hrm import HrmConfig
from sftplay.plan.puzzles.weights import PuzzleShape
from sftplay.plan.shape.model_shape import ModelShape


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
