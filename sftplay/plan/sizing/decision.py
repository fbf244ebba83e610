"""One value that the kit chose in place of `auto`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Decision:
    """One value the kit chose, and why."""

    key: str
    value: Any
    reason: str
