"""Puzzles as people write them: a line for each row of the grid, a character for each cell."""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sftplay.data.puzzles.folder import Facts
from sftplay.data.puzzles.sudoku import UNIT_NAMES, list_units
from sftplay.errors import DataError

UNLABELLED = "·"
"""Stands for a cell without a label."""

WITHOUT_SYMBOLS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""Characters of tokens in a folder that names none."""

PUT_RIGHT = "correct the line"


@dataclass(frozen=True)
class GridText:
    """The text form of the grids of a folder."""

    kind: str
    symbols: str
    columns: int
    pad_id: int

    @classmethod
    def from_facts(cls, facts: Facts) -> GridText:
        """Return the text form of a folder's grids; a folder without a shape has square ones."""
        columns = facts.shape[-1] if facts.shape else isqrt(facts.seq_len - 1) + 1
        return cls(facts.kind, facts.symbols or WITHOUT_SYMBOLS, columns, facts.pad_id)

    @property
    def is_sudoku(self) -> bool:
        """True if rows, columns and boxes hold each digit once."""
        return self.kind.startswith("sudoku")

    def write(self, tokens: NDArray[Any]) -> str:
        """Write the grid of tokens [cells]; a negative one is a cell without a label."""
        known = dict(enumerate(self.symbols))
        cells = [known.get(token, "?") if token >= 0 else UNLABELLED for token in map(int, tokens)]
        return "\n".join("".join(cells[at : at + self.columns]) for at in range(0, len(cells), self.columns))

    def read(self, text: str, *, cells: int, where: str) -> NDArray[np.int64]:
        """Read the tokens [cells] of a grid with a line for each row, or with all of it in one line.
        Raise DataError, with the line in the file `where`, where it is no grid of this kind.
        """
        lines = [numbered for numbered in enumerate(map(self._closed_up, text.splitlines()), 1) if numbered[1]]
        if not lines:
            raise DataError("is empty", where=where, fix=f"write {cells // self.columns} lines of {self.columns} cells")
        rows = cells // self.columns
        if len(lines) == 1 and len(lines[0][1]) == cells:
            number, line = lines[0]
            lines = [(number, line[at : at + self.columns]) for at in range(0, cells, self.columns)]
        elif len(lines) == 1 and len(lines[0][1]) != self.columns:
            what = f"has {len(lines[0][1])} cells in one line, and a grid of {rows} x {self.columns} has {cells}"
            fix = f"write all {cells} cells in one line, or {rows} lines of {self.columns}"
            raise DataError(what, where=f"{where}:{lines[0][0]}", fix=fix)
        tokens = [self._row(line, f"{where}:{number}") for number, line in lines[:rows]]
        if len(lines) != rows:
            last = lines[min(len(lines), rows + 1) - 1][0]
            what = f"has {len(lines)} lines, and the model knows grids of {rows} x {self.columns}"
            fix = f"write {rows} lines of {self.columns} cells, or all {cells} cells in one line"
            raise DataError(what, where=f"{where}:{last}", fix=fix)
        grid = np.array(tokens, np.int64).ravel()
        blank = self.symbols.index(".") if self.is_sudoku else 0
        for unit, places in enumerate(list_units(self.columns) if self.is_sudoku else ()):
            values = grid[places]
            twice = [place for place in places if grid[place] != blank and (values == grid[place]).sum() > 1]
            if twice:
                name = f"{UNIT_NAMES[unit // self.columns]} {unit % self.columns + 1}"
                what = f"gives {self.symbols[grid[twice[1]]]} twice in {name}"
                raise DataError(what, where=f"{where}:{lines[int(twice[1]) // self.columns][0]}", fix=PUT_RIGHT)
        return grid

    def _closed_up(self, line: str) -> str:
        """Return a line without the spaces that set cells apart. Where a space is a cell, a row may be spaces only."""
        if " " not in self._tokens():
            return "".join(line.split())
        return line if line.strip() or len(line) == self.columns else ""

    def _tokens(self) -> dict[str, int]:
        return {symbol: token for token, symbol in enumerate(self.symbols) if token != self.pad_id}

    def _row(self, line: str, where: str) -> list[int]:
        if len(line) != self.columns:
            raise DataError(f"has {len(line)} cells, not {self.columns}", where=where, fix=PUT_RIGHT)
        known = self._tokens()
        if self.is_sudoku:
            known["0"] = known["."]
        for place, character in enumerate(line, 1):
            if character not in known:
                what = f"holds {character!r} at {place}; a cell is one of {''.join(known)!r}"
                raise DataError(what, where=where, fix=PUT_RIGHT)
        return [known[character] for character in line]

    def breaks_rules(self, tokens: NDArray[Any]) -> bool:
        """Return whether a row, column or box of an answered Sudoku does not hold each digit once."""
        wanted = [token for token, symbol in enumerate(self.symbols) if symbol.isdecimal()]
        return self.is_sudoku and any(sorted(tokens[cells].tolist()) != wanted for cells in list_units(self.columns))
