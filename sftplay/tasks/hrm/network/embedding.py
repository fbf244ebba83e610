"""The table of puzzle embeddings: a row for each identifier, moved by the sign of its gradient.

Of thousands of rows a step touches a few. The optimizer and the exchange of dense gradients never see the table. All
ranks gather the gradients of the touched rows and sum them alike; each moves the rows that it holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sftplay.tasks.hrm.network.table_share import TableShare, from_all_ranks

ALL_ROWS = TableShare()


class Touched(NamedTuple):
    """Rows that a step has looked up, with duplicates."""

    ids: Tensor
    """int64 [rows]"""

    gradients: Tensor
    """fp32 [rows, dim]"""


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
        """The rows of `ids`. Where gradients are on, a copy of them that gets a gradient, until `take` is called.

        Where the table is shared out, all ranks call it, with equally many ids each.
        """
        found = self.share.fetch(ids, self.rows) if self.is_shared_out else self.rows[ids]
        if torch.is_grad_enabled():
            self._looked_up.append((ids, found.requires_grad_()))
        return found

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
        if torch.distributed.is_initialized():
            touched = Touched(*(torch.cat(from_all_ranks(mine)) for mine in touched))
        different, place = touched.ids.unique(return_inverse=True)
        total = touched.gradients.new_zeros(len(different), self.rows.shape[1]).index_add_(0, place, touched.gradients)
        mine = different
        if self.is_shared_out:
            held = self.share.holds(different)
            mine, total = self.share.places(different[held]), total[held]
        self.rows[mine] = self.rows[mine] * (1 - rate * weight_decay) - rate * total.sign()
        return len(different)

    def copy_from_main(self) -> None:
        """Make the table of every rank that of rank 0; nothing where each row has one holder."""
        if torch.distributed.is_initialized() and not self.is_shared_out:
            torch.distributed.broadcast(self.rows, src=0)

    def norm(self) -> Tensor:
        """The norm of all rows. All ranks call it."""
        mine = self.rows.norm()
        return torch.stack(from_all_ranks(mine)).norm() if self.is_shared_out else mine

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
        """Take this rank's rows of the whole table in `state_dict`."""
        whole = state_dict.get(f"{prefix}rows")
        if self.is_shared_out and whole is not None:
            state_dict = {**state_dict, f"{prefix}rows": self.share.of_whole(whole)}
        super()._load_from_state_dict(state_dict, prefix, *rest)
