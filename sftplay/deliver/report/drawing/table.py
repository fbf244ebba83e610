"""A table as `templates/page.html` shows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of texts; a narrow page scrolls it in itself, or with `stacks` shows the cells of a row below each other."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    kinds: str = ""
    """One letter per column: `n` figures, `c` code, `b` the width of a bar, else text."""

    caption: str = ""
    stacks: bool = False

    def kind(self, column: int) -> str:
        """The letter of a column."""
        return self.kinds[column : column + 1]
