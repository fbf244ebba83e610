"""Objects of all ranks, brought to one of them."""

from __future__ import annotations

from typing import Any

import torch

from sftplay import log


def objects_on(rank: int, mine: Any) -> list[Any]:
    """What each rank has, in rank order, on `rank`; nothing on others. All ranks call it."""
    if log.world_size() == 1:
        return [mine]
    found: list[Any] | None = [None] * log.world_size() if log.rank() == rank else None
    torch.distributed.gather_object(mine, found, dst=rank)
    return found or []
