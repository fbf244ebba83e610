"""What a user chooses for a folder of puzzles."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The choices of one `puzzle-data`."""

    kind: str
    source: Path | None
    """A file or a folder; None for puzzles that need none."""

    out: Path
    copies: int | None = None
    """Augmented copies of each original; None takes the kind's usual number."""

    seed: int = 0
    subsample: int | None = None
    """Training puzzles that are drawn; None takes all."""

    held_out: float = 0.1
    """The share of the solutions of a single file that goes to the test."""

    workers: int = 1
