"""Which rows of the table of puzzle embeddings a rank holds, and how ranks hand each other rows.

A row belongs to the rank `identifier % world`. Rows travel as they are, bit for bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

PIECE_BYTES = 2**26
"""Rows that all ranks together send at a time where the whole table is collected."""


class TableShare(NamedTuple):
    """The part of a rank; by default all rows. Every rank has room for equally many."""

    rank: int = 0
    world: int = 1

    def room(self, identifiers: int) -> int:
        """Rows that a rank has room for; the last one of some ranks stays empty."""
        return -(-identifiers // self.world)

    def holds(self, ids: Tensor) -> Tensor:
        """bool, as long as `ids`: whose rows are here."""
        return ids % self.world == self.rank

    def places(self, ids: Tensor) -> Tensor:
        """Where the rank that holds them has their rows."""
        return ids // self.world

    def of_whole(self, whole: Tensor) -> Tensor:
        """This rank's rows of a table that has all of them."""
        mine = whole[self.rank :: self.world]
        return torch.nn.functional.pad(mine, (0, 0, 0, self.room(len(whole)) - len(mine)))

    def fetch(self, ids: Tensor, rows: Tensor) -> Tensor:
        """The rows of `ids`, each from the rank that holds it; `rows` are this rank's.

        All ranks call it, with equally many ids each.
        """
        wanted = from_all_ranks(ids)
        answers = [rows[self.places(each[self.holds(each)])] for each in wanted]
        owners = ids % self.world
        received = rows.new_empty(len(ids), rows.shape[1])
        torch.distributed.all_to_all_single(
            received,
            torch.cat(answers),
            output_split_sizes=owners.bincount(minlength=self.world).tolist(),
            input_split_sizes=[len(each) for each in answers],
        )
        found = torch.empty_like(received)
        found[owners.argsort(stable=True)] = received  # each rank answers in the order of the question
        return found

    def collect(self, rows: Tensor, identifiers: int) -> Tensor:
        """All rows on rank 0, in its host memory; none on other ranks. All ranks call it, each with its rows."""
        whole = torch.empty(self.room(identifiers) * self.world if self.rank == 0 else 0, rows.shape[1])
        at_once = max(1, PIECE_BYTES // (rows.shape[1] * rows.element_size() * self.world))
        for start in range(0, len(rows), at_once):
            piece = rows[start : start + at_once].contiguous()
            parts = [torch.empty_like(piece) for _ in range(self.world)] if self.rank == 0 else None
            torch.distributed.gather(piece, parts, dst=0)
            if parts is not None:
                whole[start * self.world :][: len(piece) * self.world] = torch.stack(parts, dim=1).flatten(0, 1).cpu()
        return whole[:identifiers]


def from_all_ranks(mine: Tensor) -> list[Tensor]:
    """What each rank has, in rank order. All ranks call it with the same shape."""
    parts = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(parts, mine.contiguous())
    return parts
