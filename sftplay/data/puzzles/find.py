"""Find the folders of `data.train_path` and `data.val_path`, and make puzzles that need no file."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from sftplay.data.cache import ensure_folder, fingerprint
from sftplay.data.puzzles.folder import FACTS, PuzzleFolder, write_folder
from sftplay.data.puzzles.small_sudokus import ALPHABET, SEED, make_groups
from sftplay.errors import ConfigError, DataError, nearest_names
from sftplay.places import cache_root

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
            write_folder(unfinished, make_groups()[split], alphabet=ALPHABET)

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
