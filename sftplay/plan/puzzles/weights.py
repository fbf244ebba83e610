"""The weights of the model of puzzles, counted from the section `hrm` and the grid. It builds nothing.

`tasks.hrm.network` builds what is counted here; a test holds the two against each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sftplay.config.schema.hrm import HrmConfig

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
