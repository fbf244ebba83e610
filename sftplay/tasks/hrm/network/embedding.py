"""The table of puzzle embeddings: a row for each identifier, moved by the sign of its gradient.

Of thousands of rows a step touches a few. The optimizer and the exchange of dense gradients never see the table. All
ranks gather the touched rows and compute the same update.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn


class Touched(NamedTuple):
    """Rows that a step has looked up, with duplicates."""

    ids: Tensor
    """int64 [rows]"""

    gradients: Tensor
    """fp32 [rows, dim]"""


class PuzzleTable(nn.Module):
    """The rows, a persistent buffer that begins with zeros."""

    rows: Tensor

    def __init__(self, identifiers: int, dim: int) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(identifiers, dim))
        self._looked_up: list[tuple[Tensor, Tensor]] = []

    def forward(self, ids: Tensor) -> Tensor:
        """The rows of `ids`. Where gradients are on, a copy of them that gets a gradient, until `take` is called."""
        if not torch.is_grad_enabled():
            return self.rows[ids]
        copied = self.rows[ids].requires_grad_()
        self._looked_up.append((ids, copied))
        return copied

    def take(self) -> Touched:
        """What was looked up since the last call, with its gradients; rows without one count as zero."""
        taken, self._looked_up = self._looked_up, []
        ids = [ids for ids, _ in taken]
        gradients = [torch.zeros_like(copied) if copied.grad is None else copied.grad for _, copied in taken]
        if not taken:
            return Touched(self.rows.new_zeros(0, dtype=torch.int64), self.rows.new_zeros(0, self.rows.shape[1]))
        return Touched(torch.cat(ids).long(), torch.cat(gradients))

    def update(self, touched: Touched, *, rate: float, weight_decay: float) -> int:
        """Move the touched rows by `rate` against the sign of the summed gradient; the number of different rows.

        All ranks call it, with equally many rows each. Decay is decoupled and reaches touched rows alone.
        """
        ids, gradients = gathered(touched)
        different, place = ids.unique(return_inverse=True)
        total = gradients.new_zeros(len(different), gradients.shape[1]).index_add_(0, place, gradients)
        moved = self.rows[different] * (1 - rate * weight_decay) - rate * total.sign()
        self.rows[different] = moved
        return len(different)

    def copy_from_main(self) -> None:
        """Make the table of every rank that of rank 0."""
        if torch.distributed.is_initialized():
            torch.distributed.broadcast(self.rows, src=0)


def gathered(touched: Touched) -> Touched:
    """The rows of all ranks, in rank order."""
    if not torch.distributed.is_initialized():
        return touched
    world = torch.distributed.get_world_size()
    together = []
    for mine in touched:
        parts = [torch.empty_like(mine) for _ in range(world)]
        torch.distributed.all_gather(parts, mine.contiguous())
        together.append(torch.cat(parts))
    return Touched(*together)
