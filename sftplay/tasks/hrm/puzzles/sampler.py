"""Find the puzzles of a run, and choose those of a rank, their order, and where to resume."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sftplay.data.cache import ensure_folder, fingerprint
from sftplay.data.records import IGNORE_INDEX
from sftplay.errors import ConfigError, DataError, nearest_names
from sftplay.places import cache_root
from sftplay.tasks.hrm.puzzles.folder import AGAIN, FACTS, PuzzleFolder, PuzzleSet, array_file, write_folder
from sftplay.tasks.hrm.puzzles.sudoku import SEED, SMALL_ALPHABET, make_groups

Split = Literal["train", "test"]

BUILTIN = "builtin:"
NAMES = ("sudoku4",)
"""Names that may follow `builtin:`."""

VERSION = 1
"""Raised when the built-in puzzles change, so that older caches are not taken for new ones."""


def open_split(path: str, split: Split, *, key: str) -> PuzzleFolder:
    """Open the split that the config's `key` names: `builtin:sudoku4`, the folder of a split, or that of both.
    Raise ConfigError where no built-in puzzles have that name, DataError where the folder is not sound.
    """
    if path.startswith(BUILTIN):
        name = path.removeprefix(BUILTIN)
        if name not in NAMES:
            near = nearest_names(name, NAMES) or list(NAMES)
            what, fix = f"no built-in puzzles called {name!r}", f"use builtin:{near[0]}"
            raise ConfigError(what, where=key, fix=fix, nearest=near)
        mark = fingerprint({"name": name, "version": VERSION, "seed": SEED})

        def write_puzzles(unfinished: Path) -> None:
            write_folder(unfinished, make_groups()[split], alphabet=SMALL_ALPHABET)

        cached = cache_root() / "puzzles" / f"{name}-{split}-{mark}"
        return PuzzleFolder.open(ensure_folder(cached, write_puzzles, setting="SFTPLAY_CACHE"))
    folder = Path(path)
    inner, other = folder / split, folder / ("test" if split == "train" else "train")
    if (folder / FACTS).is_file():
        return PuzzleFolder.open(folder)
    if (other / FACTS).is_file() and not (inner / FACTS).is_file():
        # Only what is named as training puzzles may be trained on.
        alone = f", or name {other} to measure nothing" if split == "test" and key == "data.train_path" else ""
        what = f"{key} holds the split {other.name} and no {split}"
        raise DataError(what, where=path, fix=f"write {inner} too{alone}")
    return PuzzleFolder.open(inner if (inner / FACTS).is_file() else folder)


def open_splits(train_path: str, val_path: str | None) -> tuple[PuzzleFolder, PuzzleFolder | None]:
    """Open the puzzles to learn, and those to measure on: of `val_path`, else of the first's folder if it has any.
    Raise as `open_split`, and DataError where the two hold different kinds of puzzles.
    """
    train = open_split(train_path, "train", key="data.train_path")
    if val_path is not None:
        held_out = open_split(val_path, "test", key="data.val_path")
    elif train_path.startswith(BUILTIN) or train.path != Path(train_path):
        held_out = open_split(train_path, "test", key="data.train_path")
    else:
        return train, None
    facts, identifiers = train.facts, train.facts.num_puzzle_identifiers
    held_out.expect_kind(cells=facts.seq_len, words=facts.vocab_size, identifiers=identifiers, of=str(train.path))
    return train, held_out


def make_generator(mark: bytes, seed: int) -> np.random.Generator:
    """Return the random generator of the puzzle with the unique `mark`."""
    number = int.from_bytes(hashlib.sha256(mark).digest()[:8], "big")
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, number])))


@dataclass(frozen=True, kw_only=True)
class PuzzleBatch:
    """A process's rows of one batch."""

    rows: NDArray[np.int64]
    """[batch]: the number of each example in its set; -1 is padding."""

    inputs: NDArray[np.int32]
    labels: NDArray[np.int32]
    """Both [batch, cells]; a label is IGNORE_INDEX where a cell has no loss."""

    puzzle_identifiers: NDArray[np.int32]
    mask: NDArray[np.bool_]
    """[batch]: False for padding."""


class TrainBatches:
    """The rows of training, without end: iterate over it.

    A pass holds `epochs_per_pass` permutations of the groups of a set. Of each group one puzzle is sampled, and of that
    its examples in random order, until the batch of all processes is full. The incomplete last batch is dropped.
    """

    def __init__(
        self, folder: PuzzleFolder, *, seed: int, global_batch: int, rank: int, world: int,
        epochs_per_pass: int | None = None,
    ) -> None:  # fmt: skip
        """`epochs_per_pass` None: large enough that less than a hundredth of a pass is dropped at its end."""
        self.folder, self.seed = folder, seed
        self.global_batch, self.rank_slice = global_batch, _slice_batch(global_batch, rank=rank, world=world)
        self.passes, self.batches, self.position = 0, 0, 0
        self._order: NDArray[np.int32] | None = None
        sizes = [(np.diff(part.puzzle_indices), part.group_indices[:-1]) for part in folder.sets]
        least = min(int(np.minimum.reduceat(puzzles, groups).sum()) for puzzles, groups in sizes)
        self.epochs_per_pass = epochs_per_pass or -(-100 * global_batch // least)
        if least * self.epochs_per_pass < global_batch:
            what = f"{global_batch:,} rows are more than the {least * self.epochs_per_pass:,} that a pass has"
            raise ConfigError(what, where="train.effective_batch_size", fix="lower it, or prepare more puzzles")

    def __iter__(self) -> Iterator[PuzzleBatch]:
        return self

    def __next__(self) -> PuzzleBatch:
        while (examples := self._sample()) is None:
            self.passes, self.batches, self.position, self._order = self.passes + 1, 0, 0, None
        return take(self.folder, self._set(), rows=examples[self.rank_slice])

    def state(self) -> dict[str, int]:
        """Return where the next batch begins."""
        return {
            "seed": self.seed, "passes": self.passes, "batches": self.batches, "position": self.position,
            "global_batch": self.global_batch, "epochs_per_pass": self.epochs_per_pass, "examples": len(self.folder),
        }  # fmt: skip

    def restore(self, state: Mapping[str, int]) -> None:
        """Go on where another sampler was; raise ConfigError where it had other rows or settings."""
        for name in ("seed", "global_batch", "epochs_per_pass", "examples"):
            if state[name] != self.state()[name]:
                what = f"the checkpoint's rows were sampled with {name} {state[name]:,}, not {self.state()[name]:,}"
                raise ConfigError(what, where="resume", fix="resume with the data and settings of the run")
        self.passes, self.batches, self.position = state["passes"], state["batches"], state["position"]
        self._order = None

    def _set(self) -> PuzzleSet:
        return self.folder.sets[self.passes % len(self.folder.sets)]

    def _stream(self, part: int) -> np.random.Generator:
        """Return the stream of a pass, for its order (part 0) or for one of its batches: no two of them overlap."""
        return np.random.Generator(np.random.Philox(self.seed + self.passes).jumped(part))

    def _sample(self) -> NDArray[np.int64] | None:
        """Return the examples of the next whole batch; None where the pass has none left."""
        chosen = self._set()
        if self._order is None:
            stream = self._stream(0)
            parts = [stream.permutation(chosen.n_groups).astype(np.int32) for _ in range(self.epochs_per_pass)]
            self._order = np.concatenate(parts)
        groups = self._order[self.position : self.position + self.global_batch]  # each gives at least one row
        stream = self._stream(1 + self.batches)
        puzzles = stream.integers(chosen.group_indices[groups], chosen.group_indices[groups + 1])
        starts = chosen.puzzle_indices[puzzles]
        sizes = chosen.puzzle_indices[puzzles + 1] - starts
        ends = np.cumsum(sizes)
        if len(groups) == 0 or ends[-1] < self.global_batch:
            return None
        n = int(np.searchsorted(ends, self.global_batch)) + 1
        self.batches, self.position = self.batches + 1, self.position + n
        visit = np.repeat(np.arange(n), sizes[:n])
        within = np.arange(ends[n - 1]) - np.repeat(ends[:n] - sizes[:n], sizes[:n])
        examples = starts[:n][visit] + within
        shuffled = np.lexsort((stream.random(len(examples)), visit))  # the examples of a visit, in random order
        return examples[shuffled][: self.global_batch]


class TestBatches:
    """The rows of a measurement: each once, in order. Every process has the same number of batches."""

    __test__ = False  # pytest takes it for tests by its name

    def __init__(self, folder: PuzzleFolder, *, global_batch: int, rank: int, world: int) -> None:
        self.folder, self.global_batch = folder, global_batch
        self.rank_slice = _slice_batch(global_batch, rank=rank, world=world)

    def __len__(self) -> int:
        return sum(-(-len(part) // self.global_batch) for part in self.folder.sets)

    def __iter__(self) -> Iterator[PuzzleBatch]:
        for part in self.folder.sets:
            for start in range(0, len(part), self.global_batch):
                rows = np.arange(start, start + self.global_batch)[self.rank_slice]
                yield take(self.folder, part, rows=np.where(rows < len(part), rows, -1))


def take(folder: PuzzleFolder, chosen: PuzzleSet, *, rows: NDArray[np.int64]) -> PuzzleBatch:
    """Return the examples `rows` of a set; -1 makes a row of padding. Raise DataError at a token that is none."""
    facts, mask = folder.facts, rows >= 0
    known = np.where(mask, rows, 0)
    inputs, labels = chosen.inputs[known].astype(np.int32), chosen.labels[known].astype(np.int32)
    inputs[~mask] = facts.pad_id
    if facts.ignore_label_id is not None:
        labels[labels == facts.ignore_label_id] = IGNORE_INDEX
    labels[~mask] = IGNORE_INDEX
    for name, found in (("inputs", inputs), ("labels", np.where(labels == IGNORE_INDEX, 0, labels))):
        if found.min() < 0 or found.max() >= facts.vocab_size:
            what = f"holds a token outside 0 to {facts.vocab_size - 1}"
            raise DataError(what, where=str(array_file(folder.path, chosen.name, array=name)), fix=AGAIN)
    identifiers = chosen.puzzle_identifiers[chosen.find_puzzles(known)].astype(np.int32)
    identifiers[~mask] = facts.blank_identifier_id
    cells = {"inputs": inputs, "labels": labels}
    return PuzzleBatch(rows=rows, **cells, puzzle_identifiers=identifiers, mask=mask)


def _slice_batch(global_batch: int, *, rank: int, world: int) -> slice:
    if global_batch % world:
        what = f"{global_batch:,} rows cannot be split evenly over {world} processes"
        raise ConfigError(what, where="train.effective_batch_size", fix=f"take a multiple of {world}")
    size = global_batch // world
    return slice(rank * size, (rank + 1) * size)
