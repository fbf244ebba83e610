"""A folder of puzzles in HRM's published form."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from sftplay.errors import DataError

FACTS = "dataset.json"
ARRAYS = ("inputs", "labels", "puzzle_identifiers", "puzzle_indices", "group_indices")
AGAIN = "write the folder again with make puzzle-data"

CHECKED_BYTES, BLOCK_BYTES = 1 << 28, 1 << 20
"""Of a larger array only this many bytes are read for the check, in evenly spaced blocks. `sampler.take` checks every
row that is used."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The content of a split's `dataset.json`."""

    pad_id: int
    ignore_label_id: int | None
    """The label of a cell that is not learned; None where every label counts."""

    blank_identifier_id: int
    vocab_size: int
    seq_len: int
    num_puzzle_identifiers: int
    total_groups: int
    mean_puzzle_examples: float
    sets: tuple[str, ...]
    kind: str = ""
    """sudoku, sudoku4, maze or arc; empty in a folder of another program."""

    shape: tuple[int, ...] = ()
    """Rows and columns of the grid; empty where they are not known."""

    symbols: str = ""
    """The character of each token; empty where it is not known."""


@dataclass(frozen=True, kw_only=True)
class PuzzleSet:
    """The arrays of one set of a split, memory-mapped."""

    name: str
    inputs: NDArray[Any]
    """int [examples, cells]"""

    labels: NDArray[Any]
    """int [examples, cells]"""

    puzzle_identifiers: NDArray[Any]
    """int [puzzles]: which row of the embedding table a puzzle has."""

    puzzle_indices: NDArray[Any]
    """int [puzzles + 1]: where the examples of a puzzle begin."""

    group_indices: NDArray[Any]
    """int [groups + 1]: where the puzzles of a group begin."""

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def n_groups(self) -> int:
        """Originals, each with its augmented copies."""
        return len(self.group_indices) - 1

    def find_puzzles(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Find the number of the puzzle that each example belongs to."""
        return np.searchsorted(self.puzzle_indices, rows, side="right") - 1


@dataclass(frozen=True)
class PuzzleFolder:
    """A split that was checked."""

    path: Path
    facts: Facts
    sets: tuple[PuzzleSet, ...]

    @classmethod
    def open(cls, path: Path) -> PuzzleFolder:
        """Open the split in the folder `path`; raise DataError where something is missing or contradicts itself."""
        facts = _read_facts(path)
        sets = tuple(_open_set(path, name, facts=facts) for name in facts.sets)
        groups = sum(puzzle_set.n_groups for puzzle_set in sets)
        if groups != facts.total_groups:
            raise _fault(path / FACTS, f"total_groups is {facts.total_groups:,}, but the sets hold {groups:,}")
        return cls(path, facts, sets)

    def __len__(self) -> int:
        return sum(map(len, self.sets))

    def expect_kind(self, *, cells: int, words: int, identifiers: int, of: str) -> None:
        """Raise DataError if they do not fit a model with these numbers of cells, symbols and puzzle identifiers.

        `of` names the owner of these numbers.
        """
        facts, fix = self.facts, "name puzzles of the same kind, made together with those of the training"
        if (facts.seq_len, facts.vocab_size) != (cells, words):
            what = f"has {facts.seq_len} cells of {facts.vocab_size} symbols; {of} has {cells} of {words}"
            raise _fault(self.path, what, fix=fix)
        if facts.num_puzzle_identifiers > identifiers:
            what = f"has {facts.num_puzzle_identifiers:,} puzzle identifiers; {of} has {identifiers:,}"
            raise _fault(self.path, what, fix=fix)

    def total_steps(self, epochs: float, *, global_batch: int) -> int:
        """Count the steps of `epochs`; an epoch is one visit to each group."""
        return int(epochs * self.facts.total_groups * self.facts.mean_puzzle_examples / global_batch)


def array_file(folder: Path, set_name: str, *, array: str) -> Path:
    return folder / f"{set_name}__{array}.npy"


def _fault(path: Path, what: str, *, fix: str = AGAIN) -> DataError:
    return DataError(what, where=str(path), fix=fix)


def _read_facts(folder: Path) -> Facts:
    path = folder / FACTS
    if not path.is_file():
        if (folder / "train" / FACTS).is_file():
            raise _fault(folder, "holds several splits", fix=f"name one of them: {folder / 'train'}")
        what = f"holds no {FACTS}" if folder.is_dir() else "no such folder"
        raise _fault(folder, what, fix="name a folder that make puzzle-data has written, or builtin:sudoku4")
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise _fault(path, "holds no JSON object")
    given = {}
    for field in fields(Facts):
        if field.name in content:
            given[field.name] = _check_value(path, field.name, value=content[field.name])
        elif field.name not in ("kind", "shape", "symbols"):
            raise _fault(path, f"{field.name} is missing")
    facts = Facts(**given)
    for name in ("pad_id", "blank_identifier_id"):
        end = facts.vocab_size if name == "pad_id" else facts.num_puzzle_identifiers
        if not 0 <= getattr(facts, name) < end:
            raise _fault(path, f"{name} is {getattr(facts, name)}, outside 0 to {end - 1}")
    return facts


def _check_value(path: Path, name: str, *, value: Any) -> Any:
    """Return the value of a key of dataset.json, in its type."""
    if name in ("sets", "shape"):
        kind: type = str if name == "sets" else int
        if isinstance(value, list) and value and all(type(item) is kind for item in value):
            return tuple(value)
        raise _fault(path, f"{name} is {value!r}, not a list of {'names' if name == 'sets' else 'numbers'}")
    if name in ("kind", "symbols"):
        holds = isinstance(value, str)
    elif name == "mean_puzzle_examples":
        holds = type(value) in (int, float) and value > 0
    else:
        smallest = 0 if name in ("pad_id", "blank_identifier_id", "ignore_label_id") else 1
        holds = (type(value) is int and value >= smallest) or (name == "ignore_label_id" and value in (None, -100))
    if not holds:
        raise _fault(path, f"{name} is {value!r}")
    return value


def _open_set(folder: Path, name: str, *, facts: Facts) -> PuzzleSet:
    files = {array: array_file(folder, name, array=array) for array in ARRAYS}
    arrays = {array: _open_array(file) for array, file in files.items()}
    wanted = (len(arrays["inputs"]), facts.seq_len)
    for array in ("inputs", "labels"):
        if arrays[array].shape != wanted:
            what = f"has the shape {list(arrays[array].shape)}, not {list(wanted)} (examples, seq_len)"
            raise _fault(files[array], what)
        ignored = facts.ignore_label_id if array == "labels" else None
        _check_tokens(files[array], arrays[array], vocab_size=facts.vocab_size, ignored=ignored)
    numbers, path, groups = arrays["puzzle_identifiers"], files["puzzle_identifiers"], arrays["group_indices"]
    _check_offsets(files["puzzle_indices"], arrays["puzzle_indices"], n=len(numbers), end=wanted[0])
    _check_offsets(files["group_indices"], groups, n=max(0, len(groups) - 1), end=len(numbers))
    if numbers.ndim != 1:
        raise _fault(path, f"has the shape {list(numbers.shape)}, not one number for each puzzle")
    low, high, most = numbers.min(), numbers.max(), facts.num_puzzle_identifiers - 1
    if not 0 <= low <= high <= most:
        raise _fault(path, f"holds {low} to {high}; num_puzzle_identifiers allows 0 to {most}")
    return PuzzleSet(name=name, **arrays)


def _open_array(path: Path) -> NDArray[Any]:
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise _fault(path, "is missing") from None
    except (ValueError, EOFError, OSError) as error:
        raise _fault(path, f"cannot be read as an array ({str(error).splitlines()[0]})") from None
    if not isinstance(found, np.ndarray) or not np.issubdtype(found.dtype, np.integer):
        raise _fault(path, "holds no whole numbers")
    if found.ndim == 0 or len(found) == 0:
        raise _fault(path, "is empty")
    return found


def _check_offsets(path: Path, offsets: NDArray[Any], *, n: int, end: int) -> None:
    """Refuse all but the offsets of `n` parts, none of them empty, one behind the other from 0 to `end`."""
    if offsets.shape != (n + 1,) or n == 0:
        raise _fault(path, f"has the shape {list(offsets.shape)}, not [{n + 1}]")
    if offsets[0] != 0 or offsets[-1] != end:
        raise _fault(path, f"goes from {offsets[0]} to {offsets[-1]}, not from 0 to {end}")
    steps = np.diff(offsets.astype(np.int64))
    if (steps <= 0).any():
        at = int(np.argmax(steps <= 0))
        raise _fault(path, f"does not grow at {at + 1}: {offsets[at]} is followed by {offsets[at + 1]}")


def _check_tokens(path: Path, rows: NDArray[Any], *, vocab_size: int, ignored: int | None) -> None:
    size = max(1, BLOCK_BYTES // max(1, rows[0].nbytes))
    step = max(size, size * rows.nbytes // CHECKED_BYTES)
    for first in range(0, len(rows), step):
        block = rows[first : first + size]
        wrong = (block < 0) | (block >= vocab_size)
        if ignored is not None:
            wrong &= block != ignored
        if wrong.any():
            row = int(np.argmax(wrong.any(axis=1)))
            what = f"example {first + row} holds the token {int(block[row][wrong[row]][0])}"
            raise _fault(path, f"{what}; vocab_size allows 0 to {vocab_size - 1}")


SET = "all"
"""The name of the only set of a split that is written here."""


@dataclass(frozen=True, kw_only=True)
class Alphabet:
    """The meaning of the tokens of a kind of puzzle."""

    kind: str
    symbols: str
    """The character of each token; the first is the padding's."""

    shape: tuple[int, int]
    """Rows and columns of the grid."""


@dataclass(frozen=True)
class Group:
    """An original and its augmented copies."""

    inputs: NDArray[np.uint8]
    labels: NDArray[np.uint8]
    """[examples, cells], as the inputs."""

    sizes: Sequence[int] | None = None
    """Examples of each puzzle; None where each has one."""

    identifiers: Sequence[int] | None = None
    """The identifier of each puzzle; None where all are blank."""


class SplitWriter:
    """Write a split into an existing folder; the split is whole after `finish`.

    Padding has token 0 and is an ignored label; the blank identifier is 0.
    """

    def __init__(self, folder: Path, alphabet: Alphabet) -> None:
        self.folder, self.alphabet = folder, alphabet
        self.cells = alphabet.shape[0] * alphabet.shape[1]
        self._files = {array: array_file(folder, SET, array=array).open("wb") for array in ("inputs", "labels")}
        self._n_rows = 0
        self._write_headers()
        self._sizes: list[int] = []
        self._identifiers: list[int] = []
        self._ends = [0]

    def add(self, group: Group) -> None:
        for rows, file in zip((group.inputs, group.labels), self._files.values(), strict=True):
            assert rows.dtype == np.uint8, rows.dtype
            assert rows.shape == (len(group.inputs), self.cells), rows.shape
            file.write(np.ascontiguousarray(rows).tobytes())
        n = len(group.inputs)
        self._n_rows += n
        self._sizes += group.sizes if group.sizes is not None else [1] * n
        self._identifiers += group.identifiers if group.identifiers is not None else [0] * n
        self._ends.append(len(self._sizes))

    def finish(self, num_puzzle_identifiers: int | None = None) -> Facts:
        """Write `dataset.json` and return it; the default number of identifiers is one more than the largest."""
        self._write_headers()
        for file in self._files.values():
            file.close()
        sizes, identifiers = self._sizes, np.asarray(self._identifiers, np.int32)
        np.save(array_file(self.folder, SET, array="puzzle_identifiers"), identifiers)
        np.save(array_file(self.folder, SET, array="puzzle_indices"), np.cumsum([0, *sizes], dtype=np.int64))
        np.save(array_file(self.folder, SET, array="group_indices"), np.asarray(self._ends, np.int64))
        facts = Facts(
            pad_id=0, ignore_label_id=0, blank_identifier_id=0, vocab_size=len(self.alphabet.symbols),
            seq_len=self.cells, num_puzzle_identifiers=num_puzzle_identifiers or int(identifiers.max(initial=0)) + 1,
            total_groups=len(self._ends) - 1, mean_puzzle_examples=sum(sizes) / max(1, len(sizes)), sets=(SET,),
            kind=self.alphabet.kind, shape=self.alphabet.shape, symbols=self.alphabet.symbols,
        )  # fmt: skip
        (self.folder / FACTS).write_text(json.dumps(asdict(facts), indent=1) + "\n", encoding="utf-8")
        return facts

    def _write_headers(self) -> None:
        # numpy leaves room behind the header for a first axis of 21 digits (numpy.lib.format.GROWTH_AXIS_MAX_DIGITS).
        header = {"descr": "|u1", "fortran_order": False, "shape": (self._n_rows, self.cells)}
        for file in self._files.values():
            file.seek(0)
            npy.write_array_header_1_0(file, header)


def write_folder(
    folder: Path, groups: Iterable[Group], *, alphabet: Alphabet, num_puzzle_identifiers: int | None = None
) -> Facts:
    writer = SplitWriter(folder, alphabet)
    for group in groups:
        writer.add(group)
    return writer.finish(num_puzzle_identifiers)


Cells = NDArray[np.uint8]
"""[puzzles, cells]"""
