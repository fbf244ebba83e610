"""Tasks of ARC: their files, the canvas of 30 x 30, copies that augment them, and votes over these."""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sftplay.errors import DataError, SeveralErrors
from sftplay.tasks.hrm.puzzles.folder import Alphabet
from sftplay.tasks.hrm.puzzles.sudoku import in_order_of_digits

INVERSE = (0, 3, 2, 1, 4, 5, 6, 7)
"""The inverse of each way."""

WAYS = range(8)


def turned(grid: NDArray[Any], way: int) -> NDArray[Any]:
    """Return the grid, 0 as it is, 1 to 3 turned left so often, 4 and 5 mirrored, 6 and 7 along a diagonal."""
    if way < 4:
        return np.rot90(grid, way)
    return (np.fliplr(grid), np.flipud(grid), grid.T, np.fliplr(np.rot90(grid)))[way - 4]


LARGEST = 30
"""Rows or columns of a grid."""

Grid = NDArray[np.uint8]
"""[rows, columns] of colours."""


@dataclass(frozen=True)
class GridPair:
    input: Grid
    output: Grid


@dataclass(frozen=True)
class ArcTask:
    """Demonstrations of one rule, and the test pairs."""

    id: str
    train: tuple[GridPair, ...]
    test: tuple[GridPair, ...]

    @property
    def pairs(self) -> tuple[GridPair, ...]:
        return self.train + self.test


def read_tasks(folder: Path) -> list[ArcTask]:
    """Read the tasks in a folder with one json file a task, in the order of their names.
    Raise SeveralErrors, each with the place and what to do, where files hold no task.
    """
    files = sorted(folder.glob("*.json")) if folder.is_dir() else []
    if not files:
        what = "holds no json file" if folder.is_dir() else "no such folder"
        raise DataError(what, where=str(folder), fix="put one json file a task there, as in ARC-AGI's data")
    tasks, problems = [], []
    for file in files:
        try:
            tasks.append(read_task(file))
        except DataError as error:
            problems.append(error)
    if problems:
        raise SeveralErrors(problems)
    return tasks


def read_task(file: Path) -> ArcTask:
    """Read the task of a json file; raise DataError where it holds none."""
    try:
        content = json.loads(file.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        line = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        what = "is empty" if not file.stat().st_size else f"is no JSON ({str(error).splitlines()[0]})"
        raise DataError(what, where=f"{file}{line}", fix="correct the file, or take it away") from None
    return parse_task(content, file.stem, where=str(file))


def parse_task(content: Any, name: str, *, where: str) -> ArcTask:
    if not isinstance(content, dict):
        raise _fault("is no object with `train` and `test`", where)
    parts = {part: tuple(_pairs(content.get(part), f"{where} {part}")) for part in ("train", "test")}
    return ArcTask(name, parts["train"], parts["test"])


def as_json(task: ArcTask) -> dict[str, Any]:
    return {
        part: [{"input": pair.input.tolist(), "output": pair.output.tolist()} for pair in pairs]
        for part, pairs in (("train", task.train), ("test", task.test))
    }


def _pairs(found: Any, where: str) -> Iterator[GridPair]:
    if not isinstance(found, list) or not found:
        raise _fault("is no list of pairs", where)
    for number, pair in enumerate(found, 1):
        missing = [side for side in ("input", "output") if not isinstance(pair, dict) or side not in pair]
        if missing:
            raise _fault(f"has no `{'` and no `'.join(missing)}`", f"{where} {number}")
        yield GridPair(*(_grid(pair[side], f"{where} {number} {side}") for side in ("input", "output")))


def _grid(rows: Any, where: str) -> Grid:
    if not (isinstance(rows, list) and rows and all(isinstance(row, list) and row for row in rows)):
        raise _fault("is no list of rows", where)
    width = len(rows[0])
    for number, row in enumerate(rows, 1):
        if len(row) != width:
            raise _fault(f"row {number} has {len(row)} cells, row 1 has {width}", where)
        wrong = [cell for cell in row if type(cell) is not int or not 0 <= cell <= 9]
        if wrong:
            raise _fault(f"row {number} holds {wrong[0]!r}, which is no colour 0 to 9", where)
    if max(len(rows), width) > LARGEST:
        raise _fault(f"is {len(rows)} x {width}, larger than {LARGEST} x {LARGEST}", where)
    return np.array(rows, np.uint8)


def _fault(what: str, where: str) -> DataError:
    return DataError(what, where=where, fix="correct the file, or take it away")


PAD, END, FIRST_COLOUR = 0, 1, 2
ALPHABET = Alphabet(kind="arc", symbols=" |0123456789", shape=(LARGEST, LARGEST))


def on_canvas(grid: Grid, *, top: int = 0, left: int = 0) -> Grid:
    """Return the tokens of a grid, [900]. A line of END lies below it and right of it, where there is room."""
    canvas = np.zeros((LARGEST, LARGEST), np.uint8)
    bottom, right = top + grid.shape[0], left + grid.shape[1]
    canvas[top:bottom, left:right] = grid + FIRST_COLOUR
    canvas[bottom : bottom + 1, left:right] = END
    canvas[top:bottom, right : right + 1] = END
    return canvas.ravel()


def cropped(tokens: NDArray[Any]) -> Grid:
    """Return the largest rectangle of colours from the top left corner; of two equal ones that with fewer rows.

    It is empty, with the shape [0, 0], where no colour stands in the corner.
    """
    canvas = np.asarray(tokens).reshape(LARGEST, LARGEST)
    is_colour = (canvas >= FIRST_COLOUR) & (canvas < FIRST_COLOUR + 10)
    widths = np.minimum.accumulate(np.cumprod(is_colour, axis=1).sum(axis=1))
    areas = widths * np.arange(1, LARGEST + 1)
    height = int(areas.argmax()) + 1
    if areas[height - 1] == 0:
        return np.zeros((0, 0), np.uint8)
    return (canvas[:height, : widths[height - 1]] - FIRST_COLOUR).astype(np.uint8)


SEPARATOR = "|||"


@dataclass(frozen=True)
class Change:
    """A way to turn or mirror grids, and the colour that each colour becomes. Colour 0 stays."""

    way: int = 0
    colours: tuple[int, ...] = tuple(range(10))

    def apply(self, grid: Grid) -> Grid:
        return np.array(self.colours, np.uint8)[turned(grid, self.way)]

    def undo(self, grid: Grid) -> Grid:
        """Return the grid that `apply` has changed."""
        return turned(np.argsort(self.colours).astype(np.uint8)[grid], INVERSE[self.way])

    def name(self, task: str) -> str:
        """Return the identifier of the task's copy; that of the task itself where nothing changes."""
        parts = [f"t{self.way}", "".join(map(str, self.colours))] if self != Change() else []
        return SEPARATOR.join([task, *parts])


def parse_name(name: str) -> tuple[str, Change]:
    task, *parts = name.split(SEPARATOR)
    if not parts:
        return task, Change()
    way, colours = parts
    return task, Change(int(way.removeprefix("t")), tuple(map(int, colours)))


def sample_changes(task: ArcTask, n: int, *, stream: np.random.Generator) -> list[Change]:
    """Sample up to `n` changes under which the task's grids all differ; the first of the list changes nothing."""
    grids = [grid for pair in task.pairs for grid in (pair.input, pair.output)]
    by_way = [[turned(grid, way) for grid in grids] for way in WAYS]
    shapes = [bytes(size for grid in turns for size in grid.shape) for turns in by_way]
    cells = [np.concatenate([grid.ravel() for grid in turns]) for turns in by_way]

    def digest(change: Change) -> bytes:
        colours = np.array(change.colours, np.uint8)[cells[change.way]]
        return hashlib.blake2b(shapes[change.way] + colours.tobytes(), digest_size=16).digest()

    changes = [Change()]
    seen = {digest(Change())}
    for _ in range(5 * n):  # a task with few colours may have fewer copies that differ
        if len(changes) > n:
            break
        change = Change(int(stream.integers(8)), (0, *(1 + stream.permutation(9)).tolist()))
        if (mark := digest(change)) not in seen:
            seen.add(mark)
            changes.append(change)
    return changes


def canonical(pair: GridPair) -> bytes:
    """Return the same for all pairs that a change makes of each other, and for no others."""
    both = ((turned(pair.input, way), turned(pair.output, way)) for way in WAYS)
    return min(
        bytes([*first.shape, *second.shape]) + in_order_of_digits(np.concatenate([first.ravel(), second.ravel()]))
        for first, second in both
    )


NAMES = "identifiers.json"
"""The name of each identifier; see `arc.Change.name`."""

ASKED = "test_puzzles.json"
"""The tasks of the test, by their names."""

BLANK = "<blank>"


def read_names(split: Path) -> list[str]:
    """Read the names of the identifiers of a split, next to its folder `split`; raise DataError without them."""
    names = _read(split, NAMES)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _votes_fault(split.parent / NAMES, "is no list of names")
    return names


def read_asked(split: Path) -> dict[str, ArcTask]:
    """Read the tasks of the test pairs of a split, next to its folder `split`; raise DataError without them."""
    path, tasks = split.parent / ASKED, _read(split, ASKED)
    if not isinstance(tasks, dict) or not tasks:
        raise _votes_fault(path, "holds no tasks")
    return {name: parse_task(task, name, where=f"{path} {name}") for name, task in tasks.items()}


def _read(split: Path, name: str) -> Any:
    path = split.absolute().parent / name
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise _votes_fault(path, "is missing") from None
    except (ValueError, RecursionError):
        raise _votes_fault(path, "is no JSON") from None


def _votes_fault(path: Path, what: str) -> DataError:
    return DataError(what, where=str(path), fix="write the folder again with make puzzle-data KIND=arc")


KS = (1, 2, 10, 100, 1000)


@dataclass(frozen=True)
class Candidate:
    """An answer to a test input with its votes."""

    grid: Grid
    votes: int
    confidence: float
    """The mean of sigmoid(q_halt)."""


TestInput = tuple[str, bytes]
"""ArcTask and test input."""

Ballots = dict[TestInput, list[Candidate]]
"""Test input -> the answers, the first the best."""


class Tally:
    """The votes for each answer to each test input, while they come in. An empty answer has no vote."""

    def __init__(self) -> None:
        self.boxes: dict[TestInput, dict[bytes, tuple[Grid, list[float]]]] = {}
        """Test input -> key of an answer -> the answer, and the confidences of its votes."""

    def add(self, name: str, *, inputs: NDArray[Any], predicted: NDArray[Any], q_halt: float) -> None:
        """Add the answer to one test input of the copy with that name: both as tokens [900], and the score for halting,
        before the sigmoid."""
        task, change = parse_name(name)
        box = self.boxes.setdefault((task, grid_key(change.undo(cropped(inputs)))), {})
        grid = change.undo(cropped(predicted))
        if grid.size:
            score = math.exp(-abs(q_halt))  # exp(x) with x <= 0 cannot overflow
            sigmoid = (1 if q_halt >= 0 else score) / (1 + score)
            box.setdefault(grid_key(grid), (grid, []))[1].append(sigmoid)

    def shares(self, n: int) -> list[Tally]:
        """Return the same votes in `n` tallies. All votes for a task are in the one that `assign_share` names."""
        found = [Tally() for _ in range(n)]
        for question, box in self.boxes.items():
            found[assign_share(question[0], n)].boxes[question] = box
        return found

    def merge(self, other: Tally) -> None:
        for question, other_box in other.boxes.items():
            box = self.boxes.setdefault(question, {})
            for key, (grid, confidences) in other_box.items():
                box.setdefault(key, (grid, []))[1].extend(confidences)

    def ballots(self) -> Ballots:
        """Return the answers to each test input: most votes first, then the highest mean confidence."""
        ballots = {}
        for question, box in self.boxes.items():
            found = ((len(votes), math.fsum(votes) / len(votes), key, grid) for key, (grid, votes) in box.items())
            ranked = sorted(found, key=lambda answer: (-answer[0], -answer[1], answer[2]))
            ballots[question] = [Candidate(grid, n, confidence) for n, confidence, _, grid in ranked]
        return ballots


def assign_share(task: str, n: int) -> int:
    """Return which of `n` shares the votes for a task belong to: the same in every process."""
    return zlib.crc32(task.encode()) % n


def compute_ranks(task: ArcTask, ballots: Ballots) -> list[float]:
    """Compute for each test input the least k with its output among the first k answers; inf for never."""
    ranks: list[float] = []
    for pair in task.test:
        keys = [grid_key(candidate.grid) for candidate in ballots.get((task.id, grid_key(pair.input)), [])]
        right = grid_key(pair.output)
        ranks.append(keys.index(right) + 1 if right in keys else math.inf)
    return ranks


def share_solved(ranks: Sequence[Sequence[float]], *, ks: Sequence[int] = KS) -> dict[int, float]:
    """Return the mean over tasks of the share of test inputs that is solved with k tries, from the least k of each.

    TRM's published figures count so (evaluators/arc.py): half a task of two test inputs is half a point. With the
    largest least k of each task alone, it is the share of whole tasks.
    """
    return {k: float(np.mean([(np.array(task_ranks) <= k).mean() for task_ranks in ranks])) for k in ks}


def grid_key(grid: Grid) -> bytes:
    """Return the same for equal grids only."""
    return bytes(grid.shape) + grid.astype(np.uint8).tobytes()
