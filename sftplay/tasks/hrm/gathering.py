"""Objects of all ranks, brought to one of them."""

from __future__ import annotations

from typing import Any

import torch

from sftplay import log


def gathered(mine: Any, *, on: int = 0) -> list[Any]:
    """What each rank has, in rank order, on the rank `on`; nothing on others. All ranks call it."""
    if log.world_size() == 1:
        return [mine]
    found: list[Any] | None = [None] * log.world_size() if log.rank() == on else None
    torch.distributed.gather_object(mine, found, dst=on)
    return found or []
