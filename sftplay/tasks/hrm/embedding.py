"""Embeddings of puzzles as a sparse table with its own optimizer, and its rows over the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

PIECE_BYTES = 2**26
"""Rows that all ranks together send at a time where the whole table is collected."""


class TableShare(NamedTuple):
    """The part of a rank; by default all rows. Rank r holds every n-th row from r on, at the place id // n."""

    rank: int = 0
    world: int = 1

    def room(self, identifiers: int) -> int:
        """Count the rows that a rank has room for, equally many on all; the last one of some ranks stays empty."""
        return -(-identifiers // self.world)

    def holds(self, ids: Tensor) -> Tensor:
        """Return bool, as long as `ids`: whose rows are here."""
        return ids % self.world == self.rank

    def fetch(self, ids: Tensor, rows: Tensor) -> Tensor:
        """Fetch the rows of `ids`, each from the rank that holds it; `rows` are this rank's.

        All ranks call it, with equally many ids each.
        """
        answers = [rows[asked[self.holds(asked)] // self.world] for asked in gather_tensors(ids)]
        owners = ids % self.world
        received = rows.new_empty(len(ids), rows.shape[1])
        torch.distributed.all_to_all_single(
            received,
            torch.cat(answers),
            output_split_sizes=owners.bincount(minlength=self.world).tolist(),
            input_split_sizes=[len(answer) for answer in answers],
        )
        found = torch.empty_like(received)
        found[owners.argsort(stable=True)] = received  # each rank answers in the order of the question
        return found

    def collect(self, rows: Tensor, identifiers: int) -> Tensor:
        """Collect all rows on rank 0, in its host memory; none on other ranks. All ranks call it, with their rows."""
        whole = torch.empty(self.room(identifiers) * self.world if self.rank == 0 else 0, rows.shape[1])
        at_once = max(1, PIECE_BYTES // (rows.shape[1] * rows.element_size() * self.world))
        for start in range(0, len(rows), at_once):
            piece = rows[start : start + at_once].contiguous()
            parts = [torch.empty_like(piece) for _ in range(self.world)] if self.rank == 0 else None
            torch.distributed.gather(piece, parts, dst=0)
            if parts is not None:
                whole[start * self.world :][: len(piece) * self.world] = torch.stack(parts, dim=1).flatten(0, 1).cpu()
        return whole[:identifiers]


def gather_tensors(tensor: Tensor) -> list[Tensor]:
    """Gather each rank's tensor, in rank order. All ranks call it with the same shape."""
    parts = [torch.empty_like(tensor) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(parts, tensor.contiguous())
    return parts


ALL_ROWS = TableShare()


class Touched(NamedTuple):
    """Rows that a step has looked up, with duplicates: int64 [rows], and fp32 [rows, dim]."""

    ids: Tensor
    gradients: Tensor


class PuzzleTable(nn.Module):
    """The rows, a persistent buffer that begins with zeros: all of them, or those of this rank's share."""

    rows: Tensor

    def __init__(self, identifiers: int, dim: int, *, share: TableShare = ALL_ROWS) -> None:
        super().__init__()
        self.identifiers, self.share = identifiers, share
        self.register_buffer("rows", torch.zeros(share.room(identifiers), dim))
        self._looked_up: list[tuple[Tensor, Tensor]] = []
        self._collected: Tensor | None = None

    @property
    def is_shared_out(self) -> bool:
        """Whether other ranks hold some of the rows."""
        return self.share.world > 1

    def forward(self, ids: Tensor) -> Tensor:
        """Look up the rows of `ids`. Where gradients are on, it is a copy that gets a gradient, until `take` is called.

        Where the table is shared out, all ranks call it, with equally many ids each.
        """
        found = self.share.fetch(ids, self.rows) if self.is_shared_out else self.rows[ids]
        if torch.is_grad_enabled():
            self._looked_up.append((ids, found.requires_grad_()))
        return found

    def take(self) -> Touched:
        """Return what was looked up since the last call, with its gradients; rows without one count as zero."""
        taken, self._looked_up = self._looked_up, []
        if not taken:
            return Touched(self.rows.new_zeros(0, dtype=torch.int64), self.rows.new_zeros(0, self.rows.shape[1]))
        gradients = [torch.zeros_like(copied) if copied.grad is None else copied.grad for _, copied in taken]
        return Touched(torch.cat([ids for ids, _ in taken]).long(), torch.cat(gradients))

    def update(self, touched: Touched, *, rate: float, weight_decay: float) -> int:
        """Move the touched rows by `rate` against the sign of the summed gradient; return the number of different rows.

        All ranks call it, with equally many rows each. Decay is decoupled and reaches touched rows alone.
        """
        if torch.distributed.is_initialized():
            touched = Touched(*(torch.cat(gather_tensors(part)) for part in touched))
        different, place = touched.ids.unique(return_inverse=True)
        total = touched.gradients.new_zeros(len(different), self.rows.shape[1]).index_add_(0, place, touched.gradients)
        held = self.share.holds(different)
        rows, total = different[held] // self.share.world, total[held]
        self.rows[rows] = self.rows[rows] * (1 - rate * weight_decay) - rate * total.sign()
        return len(different)

    def copy_from_main(self) -> None:
        """Make the table of every rank that of rank 0; nothing where each row has one holder."""
        if torch.distributed.is_initialized() and not self.is_shared_out:
            torch.distributed.broadcast(self.rows, src=0)

    def norm(self) -> Tensor:
        """Compute the norm of all rows. All ranks call it."""
        norm = self.rows.norm()
        return torch.stack(gather_tensors(norm)).norm() if self.is_shared_out else norm

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Within it `state_dict` has all rows on rank 0. All ranks enter it."""
        if self.is_shared_out:
            self._collected = self.share.collect(self.rows, self.identifiers)
        try:
            yield
        finally:
            self._collected = None

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.is_shared_out:
            assert self._collected is not None, "a share of the table would be taken for all of it"
            destination[f"{prefix}rows"] = self._collected

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        whole, share = state_dict.get(f"{prefix}rows"), self.share
        if self.is_shared_out and whole is not None:
            rows = whole[share.rank :: share.world]
            padded = torch.nn.functional.pad(rows, (0, 0, 0, share.room(len(whole)) - len(rows)))
            state_dict = {**state_dict, f"{prefix}rows": padded}
        super()._load_from_state_dict(state_dict, prefix, *rest)
