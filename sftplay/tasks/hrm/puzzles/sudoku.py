"""Sudoku: grids, rules, the small ones made without a file, and a grid as people write it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import permutations, product
from math import isqrt
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sftplay.errors import DataError
from sftplay.tasks.hrm.puzzles.folder import Alphabet, Cells, Facts, Group

Grids = NDArray[np.uint8]
"""[grids, cells]: 0 is a blank, else the digit."""

Nodes = tuple[NDArray[np.int64], NDArray[np.uint16]]
"""The puzzle of each search node, and its candidates."""

AT_ONCE = 1024
"""Search nodes that are processed together."""

MOST_NODES = 200_000
"""Nodes of one puzzle, after which the search gives it up. Those of published lists took fewer than a thousand."""

BITS = np.array([number.bit_count() for number in range(1 << 9)], np.uint8)


@dataclass(frozen=True)
class Solutions:
    owners: NDArray[np.int64]
    """[solutions]: the puzzle that each solves."""

    grids: Grids
    """[solutions, cells]"""

    given_up: NDArray[np.bool_]
    """[puzzles]: the search was cut off."""

    @property
    def counts(self) -> NDArray[np.int64]:
        """[puzzles]: how many were found."""
        return np.bincount(self.owners, minlength=len(self.given_up))


@cache
def list_units(size: int) -> NDArray[np.int64]:
    """Return [units, size]: the cells of each row, column and box of a grid with `size` rows."""
    box = int(size**0.5)
    cells = np.arange(size * size).reshape(size, size)
    boxes = cells.reshape(box, box, box, box).swapaxes(1, 2).reshape(size, size)
    return np.concatenate([cells, cells.T, boxes])


@cache
def find_cell_units(size: int) -> NDArray[np.int64]:
    """Return [cells, 3]: the row, column and box of each cell, by their place in `list_units`."""
    units = list_units(size)
    return np.array([np.flatnonzero((units == cell).any(axis=1)) for cell in range(size * size)])


def find_solutions(puzzles: Grids, *, most: int = 2, most_nodes: int = MOST_NODES) -> Solutions:
    """Find at least `most` solutions of each puzzle, or all where it has fewer."""
    size = round(puzzles.shape[1] ** 0.5)
    full = (1 << size) - 1
    given = puzzles.astype(np.uint16)
    options = np.where(given > 0, np.left_shift(1, np.maximum(given, 1) - 1), full).astype(np.uint16)
    stack = [(np.arange(len(puzzles)), options)]
    counts, nodes = np.zeros(len(puzzles), np.int64), np.zeros(len(puzzles), np.int64)
    owners, grids = [np.zeros(0, np.int64)], [np.zeros((0, puzzles.shape[1]), np.uint8)]
    while stack:
        # The last nodes of the stack, up to AT_ONCE.
        taken = [stack.pop()]
        while stack and sum(len(owner) for owner, _ in taken) < AT_ONCE:
            taken.append(stack.pop())
        owner, options = map(np.concatenate, zip(*reversed(taken), strict=True))
        if len(owner) > AT_ONCE:
            stack.append((owner[:-AT_ONCE], options[:-AT_ONCE]))
        owner, options = owner[-AT_ONCE:], options[-AT_ONCE:]
        goes_on = (counts[owner] < most) & (nodes[owner] < most_nodes)
        owner, options = owner[goes_on], options[goes_on]
        nodes += np.bincount(owner, minlength=len(nodes))
        alive = _fill_singles(options, size)
        owner, options = owner[alive], options[alive]
        solved = (BITS[options] == 1).all(axis=1)
        counts += np.bincount(owner[solved], minlength=len(counts))
        owners.append(owner[solved])
        grids.append((np.log2(options[solved]) + 1).astype(np.uint8))
        if not solved.all():
            stack += _guess(owner[~solved], options[~solved])
    return Solutions(np.concatenate(owners), np.concatenate(grids), (nodes >= most_nodes) & (counts < most))


def _fill_singles(options: NDArray[np.uint16], size: int) -> NDArray[np.bool_]:
    """Narrow the candidates in place as far as singles go; return which nodes have no contradiction."""
    units, of_cell, full = list_units(size), find_cell_units(size), (1 << size) - 1
    alive = np.ones(len(options), bool)
    moving = np.arange(len(options))
    while len(moving):
        before = options[moving]
        single = np.where(BITS[before] == 1, before, 0)
        in_units = single[:, units]
        taken = np.bitwise_or.reduce(in_units, axis=2)
        twice_taken = (in_units.sum(axis=2) != taken).any(axis=1)
        after = np.where(single > 0, before, before & ~np.bitwise_or.reduce(taken[:, of_cell], axis=2))
        once, twice = np.zeros_like(taken), np.zeros_like(taken)
        for place in range(size):
            here = after[:, units[:, place]]
            twice |= once & here
            once |= here
        hidden = after & np.bitwise_or.reduce((once & ~twice)[:, of_cell], axis=2)
        after = np.where(hidden > 0, hidden, after)
        dead = twice_taken | (after == 0).any(axis=1) | (once != full).any(axis=1)
        alive[moving[dead]] = False
        options[moving] = after
        moving = moving[~dead & (after != before).any(axis=1)]
    return alive


def _guess(owner: NDArray[np.int64], options: NDArray[np.uint16]) -> list[Nodes]:
    """Return two nodes for each: a cell without its lowest candidate, and last, to be searched first, with it alone."""
    bits = BITS[options]
    cell = np.where(bits > 1, bits, 255).argmin(axis=1)
    nodes = np.arange(len(options))
    lowest = options[nodes, cell] & (~options[nodes, cell] + 1)
    with_it, without = options.copy(), options.copy()
    with_it[nodes, cell] = lowest
    without[nodes, cell] &= ~lowest
    return [(owner, without), (owner, with_it)]


Marks = NDArray[np.uint64]

ROUNDS = 4
"""How many times the mark of a cell is mixed with those of its row, column, box and digit."""

KEYS_AT_ONCE = 8192


@dataclass(frozen=True)
class Changes:
    """One change for each grid."""

    digits: NDArray[np.uint8]
    """[grids, 10]: what each digit becomes; a blank stays one."""

    cells: NDArray[np.int64]
    """[grids, 81]: the cell from which each new cell is taken."""

    def apply(self, grids: Grids) -> Grids:
        return np.take_along_axis(self.digits, np.take_along_axis(grids, self.cells, axis=1).astype(np.int64), axis=1)


def sample_changes(n: int, stream: np.random.Generator) -> Changes:
    """Sample `n` changes, each equally likely."""
    digits = np.concatenate([np.zeros((n, 1), np.int64), 1 + _shuffled(n, 9, stream=stream)], axis=1)
    rows, columns = _lines(n, stream), _lines(n, stream)
    cells = (rows[:, :, None] * 9 + columns[:, None, :]).reshape(n, 81)
    is_transposed = stream.random(n) < 0.5
    cells[is_transposed] = cells[is_transposed] % 9 * 9 + cells[is_transposed] // 9
    return Changes(digits.astype(np.uint8), cells)


def _lines(n: int, stream: np.random.Generator) -> NDArray[np.int64]:
    """Return [n, 9]: orders of the rows (or columns) in which those of a band stay together."""
    bands = _shuffled(n, 3, stream=stream)
    within = _shuffled(3 * n, 3, stream=stream).reshape(n, 3, 3)
    return (bands[:, :, None] * 3 + within).reshape(n, 9)


def _shuffled(n: int, size: int, *, stream: np.random.Generator) -> NDArray[np.int64]:
    return stream.permuted(np.tile(np.arange(size), (n, 1)), axis=1)


def compute_grid_keys(grids: Grids) -> Marks:
    """Return [grids]: a number that all copies of a grid share. Few other grids have the same."""
    parts = (cell_marks(grids[at : at + KEYS_AT_ONCE]) for at in range(0, len(grids), KEYS_AT_ONCE))
    return np.concatenate([np.zeros(0, np.uint64), *(_mix(marks).sum(axis=(1, 2)) for marks in parts)])


def cell_marks(grids: Grids) -> Marks:
    """Return [grids, 9, 9]: numbers of the cells that move with them under any change (colour refinement)."""
    found = grids.reshape(-1, 9, 9)
    marks = _mix((found > 0).astype(np.uint64))
    is_solved = (found > 0).all(axis=(1, 2))
    if is_solved.any():  # all cells of a solved grid have the same surroundings
        lines = _cycle_marks(found[is_solved])[:, :, None]
        across = _cycle_marks(found[is_solved].swapaxes(1, 2))[:, None, :]
        marks[is_solved] += _mix(lines) + _mix(across)
    for _ in range(ROUNDS):
        mixed = _mix(marks + np.uint64(1))
        digits = np.zeros_like(marks)
        for digit in range(10):
            is_here = found == digit
            digits += is_here * np.where(is_here, mixed, 0).sum(axis=(1, 2), keepdims=True, dtype=np.uint64)
        boxes = mixed.reshape(-1, 3, 3, 3, 3).sum(axis=(2, 4))
        in_boxes = np.repeat(np.repeat(boxes, 3, axis=1), 3, axis=2)
        # Rows and columns are taken in alike, because a grid may be transposed.
        across = _mix(_line_marks(mixed)) + _mix(_line_marks(mixed.swapaxes(1, 2)).swapaxes(1, 2))
        marks = _mix(marks + _mix(digits) * np.uint64(3) + _mix(in_boxes) * np.uint64(5) + across * np.uint64(7))
    return marks


def _cycle_marks(solved: NDArray[np.uint8]) -> Marks:
    """Return [grids, 9]: the cycles of the exchanges of digits that turn each row into the others of its band."""
    bands = (solved - 1).reshape(-1, 3, 9)
    cycles = np.zeros((len(bands), 3), np.uint64)
    for first, second in ((0, 1), (0, 2), (1, 2)):
        becomes = np.take_along_axis(bands[:, second], np.argsort(bands[:, first], axis=1), axis=1).astype(np.int64)
        at, length = becomes, np.ones(becomes.shape, np.uint64)
        for _ in range(8):  # no cycle of nine digits is longer
            is_home = at == np.arange(9)
            length += ~is_home
            at = np.where(is_home, at, np.take_along_axis(becomes, at, axis=1))
        mark = _mix(_mix(length).sum(axis=1))
        cycles[:, first] += mark
        cycles[:, second] += mark
    return cycles.reshape(-1, 9)


def _line_marks(mixed: Marks) -> Marks:
    """Return [grids, 9, 1]: a number for each row, together with the rows of its band."""
    rows = mixed.sum(axis=2)
    bands = np.repeat(_mix(rows).reshape(-1, 3, 3).sum(axis=2), 3, axis=1)
    return _mix(rows * np.uint64(11) + _mix(bands))[:, :, None]


def _mix(numbers: Marks) -> Marks:
    """Return the last step of splitmix64 (Steele et al. 2014): each bit of the result depends on all bits."""
    numbers = numbers + np.uint64(0x9E3779B97F4A7C15)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def is_copy(one: NDArray[np.uint8], other: NDArray[np.uint8]) -> bool:
    """Return whether a change turns one grid into the other, by trying all changes that the cells' marks allow."""
    target, goal = cell_marks(other[None])[0], other.reshape(9, 9)
    for grid in (one.reshape(9, 9), one.reshape(9, 9).T):
        marks = cell_marks(np.ascontiguousarray(grid).reshape(1, 81))[0]
        columns = ORDERS[(np.sort(marks, axis=0)[:, ORDERS] == np.sort(target, axis=0)[:, None]).all(axis=(0, 2))]
        for rows in ORDERS[(np.sort(marks, axis=1)[ORDERS] == np.sort(target, axis=1)).all(axis=(1, 2))]:
            fits = (marks[rows][:, columns] == target[:, None]).all(axis=(0, 2))
            if any(in_order_of_digits(grid[rows][:, order]) == in_order_of_digits(goal) for order in columns[fits]):
                return True
    return False


def in_order_of_digits(grid: NDArray[np.uint8]) -> bytes:
    """Return the grid with its digits renamed in the order in which they come: the same for all exchanges of digits."""
    names = {0: 0}
    return bytes(names.setdefault(digit, len(names)) for digit in grid.ravel().tolist())


THREES = np.array(list(permutations(range(3))))
ORDERS = np.array([
    (3 * bands[:, None] + np.array(within)).ravel() for bands in THREES for within in product(THREES, repeat=3)
])  # fmt: skip
"""[1296, 9]: all orders of the rows in which those of a band stay together."""


UNIT_NAMES = ("row", "column", "box")


class Sudoku:
    """9x9 grids; `.` or 0 is a blank.

    Cells hold the place of their character in `alphabet.symbols`, less one: 0 is the first behind the padding's.
    """

    alphabet = Alphabet(kind="sudoku", symbols=" .123456789", shape=(9, 9))
    copies = 1000  # of each training puzzle where the user names no number
    most_copies: int | None = None  # as many as one wants
    also_blank = "0"  # other characters for the alphabet's first behind the padding's
    # Numbers that all copies share, and few others; those of the answer decide on which side of the split a puzzle is.
    question_keys = answer_keys = staticmethod(compute_grid_keys)
    is_copy = staticmethod(is_copy)

    def problems(self, questions: Cells, answers: Cells) -> Iterator[tuple[int, str]]:
        """Yield answers with blanks, that break a rule or change a given; questions with none or several solutions."""
        has_blank = (answers == 0).any(axis=1)
        in_units = np.sort(answers[:, list_units(9)], axis=2)
        breaks = (in_units != np.arange(1, 10)).any(axis=2)
        changes = (questions > 0) & (questions != answers)
        found = find_solutions(questions)
        for row in np.flatnonzero(has_blank | breaks.any(axis=1) | changes.any(axis=1) | (found.counts != 1)).tolist():
            count = found.counts[row]
            if found.given_up[row] and count == 0:
                yield row, "took too long to solve: it could not be shown that it has one solution"
            elif count == 0:
                yield row, "the question has no solution"
            elif count > 1:
                yield row, f"the question has {count} solutions or more"
            elif found.given_up[row]:
                yield row, "it could not be shown in time that the question has no other solution"
            elif has_blank[row]:
                yield row, "the answer has blanks"
            elif len(changed := np.flatnonzero(changes[row])):
                line, column = divmod(int(changed[0]), 9)
                what = f"the answer has {answers[row][changed[0]]} in row {line + 1}, column {column + 1}"
                yield row, f"{what}, where the question gives {questions[row][changed[0]]}"
            else:
                unit = int(breaks[row].argmax())
                yield row, f"the answer does not have all digits in {UNIT_NAMES[unit // 9]} {unit % 9 + 1}"

    def make_copies(self, pair: Cells, n: int, *, stream: np.random.Generator) -> tuple[Cells, Cells]:
        """Return copies with digits, bands, rows, stacks and columns exchanged; every second one is transposed."""
        changes = sample_changes(n, stream)
        return changes.apply(np.tile(pair[0], (n, 1))), changes.apply(np.tile(pair[1], (n, 1)))


SMALL_ALPHABET = Alphabet(kind="sudoku4", symbols=" .1234", shape=(4, 4))
N_TRAIN = 200
PUZZLES = {"train": 6, "test": 3}
"""Puzzles of each solution."""

FEWEST, MOST = 5, 9
"""Clues of a puzzle."""

SEED = 0


def solved_grids() -> Grids:
    """Return all 288 solved grids, [288, 16], in the order of their digits."""
    found = find_solutions(np.zeros((1, 16), np.uint8), most=1000).grids
    return found[np.lexsort(found.T[::-1])]


def make_groups(seed: int = SEED) -> dict[str, list[Group]]:
    """Return the groups of the splits `train` and `test`.

    Training has each puzzle with all exchanges of digits that make no solution of the test: every solution of the test
    is new to a model. No puzzle of the test is one of training with its digits exchanged.
    """
    grids, generator = solved_grids(), Random(seed)
    exchanges = [np.array((0, *digits), np.uint8) for digits in permutations(range(1, 5))]
    order = sorted(range(len(grids)), key=[generator.random() for _ in grids].__getitem__)
    train, test = grids[order[:N_TRAIN]], grids[order[N_TRAIN:]]
    allowed = {grid.tobytes() for grid in train}
    groups: dict[str, list[Group]] = {"train": [], "test": []}
    known: set[bytes] = set()
    for grid in train:
        puzzles = _make_puzzles(grid, grids, n=PUZZLES["train"], generator=generator, taken=set())
        known |= {in_order_of_digits(puzzle) for puzzle in puzzles}
        fitting = [exchange for exchange in exchanges if exchange[grid].tobytes() in allowed]  # itself is the first
        labels = np.stack([exchange[grid] for exchange in fitting]) + np.uint8(1)
        for puzzle in puzzles:
            inputs = np.stack([exchange[puzzle] for exchange in fitting]) + np.uint8(1)
            groups["train"].append(Group(inputs, labels))
    for grid in test:
        puzzles = _make_puzzles(grid, grids, n=PUZZLES["test"], generator=generator, taken=known)
        groups["test"] += [Group(puzzle[None] + np.uint8(1), grid[None] + np.uint8(1)) for puzzle in puzzles]
    return groups


def _make_puzzles(
    grid: NDArray[np.uint8], grids: Grids, *, n: int, generator: Random, taken: set[bytes]
) -> list[NDArray[np.uint8]]:
    """Make `n` puzzles with this only solution, none like one of `taken`."""
    found: dict[bytes, NDArray[np.uint8]] = {}
    while len(found) < n:
        clues = FEWEST + int(generator.random() * (MOST - FEWEST + 1))
        puzzle = _remove_cells(grid, grids, clues=clues, generator=generator)
        if FEWEST <= (puzzle > 0).sum() <= MOST and in_order_of_digits(puzzle) not in taken:
            found.setdefault(puzzle.tobytes(), puzzle)
    return list(found.values())


def _remove_cells(grid: NDArray[np.uint8], grids: Grids, *, clues: int, generator: Random) -> NDArray[np.uint8]:
    """Remove cells in random order while the solution stays unique, until `clues` are left or no other can go."""
    kept = np.ones(len(grid), bool)
    for cell in sorted(range(len(grid)), key=[generator.random() for _ in grid].__getitem__):
        if kept.sum() == clues:
            break
        kept[cell] = False
        if (grids[:, kept] == grid[kept]).all(axis=1).sum() > 1:
            kept[cell] = True
    return np.where(kept, grid, 0).astype(np.uint8)


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
