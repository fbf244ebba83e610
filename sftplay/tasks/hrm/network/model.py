"""The Hierarchical Reasoning Model (arXiv:2506.21734): a slow and a fast module that refine a state over a whole grid.

It computes one segment from a state to the next one. What happens between segments is in `act`.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sftplay.config.schema.hrm import HrmConfig
from sftplay.tasks.hrm.network.embedding import ALL_ROWS, PuzzleTable
from sftplay.tasks.hrm.network.layers import Reasoner, Rotation
from sftplay.tasks.hrm.network.linear import Linear, truncated_normal_
from sftplay.tasks.hrm.network.table_share import TableShare

Q_BIAS = -5.0
"""Start of both Q values before the sigmoid: halting and going on look worthless at first."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What the data decides of the model."""

    vocab_size: int
    cells: int
    identifiers: int
    """Number of puzzle identifiers, the blank one among them."""


class State(NamedTuple):
    """What a segment hands to the next one; both [batch, positions, hidden]."""

    high: Tensor
    low: Tensor

    def detached(self) -> State:
        """The same without its gradients."""
        return State(self.high.detach(), self.low.detach())


class Answer(NamedTuple):
    """What the model says after a segment."""

    logits: Tensor
    """[batch, cells, vocabulary]"""

    q_halt: Tensor
    """fp32 [batch], before the sigmoid: how likely the answer is right."""

    q_continue: Tensor
    """fp32 [batch], before the sigmoid: what going on is worth."""


class PuzzleModel(nn.Module):
    """Both modules, the embeddings and the heads."""

    start_high: Tensor
    start_low: Tensor

    def __init__(
        self, hrm: HrmConfig, grid: Grid, *, dtype: torch.dtype = torch.float32, share: TableShare = ALL_ROWS
    ) -> None:
        """`dtype` is the type it computes in; its weights are fp32. `share` says which puzzle embeddings it holds."""
        super().__init__()
        self.hrm, self.grid, self.dtype = hrm, grid, dtype
        width = hrm.hidden_size
        emb_dim = width if hrm.puzzle_emb_dim is None else hrm.puzzle_emb_dim
        self.prefix = hrm.puzzle_emb_len or math.ceil(emb_dim / width)
        """Positions before the grid, which hold the puzzle's embedding."""

        positions = self.prefix + grid.cells
        self.tokens = nn.Parameter(truncated_normal_(torch.empty(grid.vocab_size, width), width**-0.5))
        self.places: nn.Parameter | None = None
        self.rotation: Rotation | None = None
        if hrm.positions == "learned":
            self.places = nn.Parameter(truncated_normal_(torch.empty(positions, width), width**-0.5))
        else:
            self.rotation = Rotation(width // hrm.num_heads, positions, theta=hrm.rope_theta)
        self.puzzles = PuzzleTable(grid.identifiers, emb_dim, share=share) if emb_dim else None
        module: dict[str, Any] = {"heads": hrm.num_heads, "expansion": hrm.expansion}
        self.low = Reasoner(hrm.l_layers, width, **module)
        self.own_high = None if hrm.arch == "single" else Reasoner(hrm.h_layers, width, **module)
        self.head = Linear(width, grid.vocab_size)
        self.q_head = nn.Linear(width, 2)
        with torch.no_grad():
            self.q_head.weight.zero_()
            self.q_head.bias.fill_(Q_BIAS)
        self.register_buffer("start_high", truncated_normal_(torch.empty(width), 1.0))
        self.register_buffer("start_low", truncated_normal_(torch.empty(width), 1.0))

    @property
    def high(self) -> Reasoner:
        """The slow module, which may be the fast one."""
        return self.low if self.own_high is None else self.own_high

    def start(self, batch: int) -> State:
        """The state before the first segment."""
        shape = (batch, self.prefix + self.grid.cells, self.hrm.hidden_size)
        return State(*(each.to(self.dtype).expand(shape) for each in (self.start_high, self.start_low)))

    def embed(self, inputs: Tensor, puzzle_rows: Tensor | None) -> Tensor:
        """The input of each call of the fast module, [batch, positions, hidden].

        `inputs` are int [batch, cells]; `puzzle_rows` the embeddings of the puzzles [batch, puzzle_emb_dim].
        """
        width = self.hrm.hidden_size
        embedded = self.tokens[inputs].to(self.dtype)
        if self.prefix and puzzle_rows is not None:
            padding = self.prefix * width - puzzle_rows.shape[-1]
            rows = nn.functional.pad(puzzle_rows.to(self.dtype), (0, padding))
            embedded = torch.cat((rows.view(-1, self.prefix, width), embedded), dim=1)
        if self.places is not None:
            embedded = math.sqrt(0.5) * (embedded + self.places.to(self.dtype))
        return math.sqrt(width) * embedded

    def forward(
        self, state: State, inputs: Tensor, *, puzzle_rows: Tensor | None, judges_alone: bool = False
    ) -> tuple[State, Answer]:
        """One segment: the state after it, detached, and the answer.

        Gradients reach the last calls alone, as `hrm.grad` says; `state` gets none. With `judges_alone` the answer has
        no cells, and the high state only its first position, from which the Q values are read.
        """
        embedded = self.embed(inputs, puzzle_rows)
        state = self._think(state.detached(), embedded, first=1 if judges_alone else None)
        q = self.q_head(state.high[:, 0].to(self.q_head.weight.dtype))
        logits = self.head(state.high[:, :0] if judges_alone else state.high[:, self.prefix :])
        return state.detached(), Answer(logits, q[:, 0], q[:, 1])

    def _think(self, state: State, embedded: Tensor, *, first: int | None) -> State:
        """All cycles. Which calls have a gradient is decided by their number; the last gives the `first` positions."""
        hrm, (high, low) = self.hrm, state
        for slow in range(hrm.h_cycles):
            is_last_cycle = slow == hrm.h_cycles - 1
            for fast in range(hrm.l_cycles):
                learns = is_last_cycle and (hrm.grad == "full_last_cycle" or fast == hrm.l_cycles - 1)
                with nullcontext() if learns else torch.no_grad():
                    low = self.low(low, high + embedded, rotation=self.rotation)
            with nullcontext() if is_last_cycle else torch.no_grad():
                high = self.high(high, low, rotation=self.rotation, first=first if is_last_cycle else None)
        return State(high, low)
