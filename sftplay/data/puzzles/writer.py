"""Writes a split of puzzles, group by group: no more than a group is in memory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from sftplay.data.puzzles.folder import FACTS, Facts, array_file

SET = "all"
"""The name of the only set of a split that is written here."""


@dataclass(frozen=True, kw_only=True)
class Alphabet:
    """What the tokens of a kind of puzzle mean."""

    kind: str
    symbols: str
    """The character of each token; the first is the padding's."""

    shape: tuple[int, int]
    """Rows and columns of the grid."""


@dataclass(frozen=True)
class Group:
    """An original and its augmented copies."""

    inputs: NDArray[np.uint8]
    """[examples, cells]"""

    labels: NDArray[np.uint8]
    """[examples, cells]"""

    sizes: Sequence[int] | None = None
    """Examples of each puzzle; None where each has one."""

    identifiers: Sequence[int] | None = None
    """The identifier of each puzzle; None where all are blank."""


class SplitWriter:
    """Writes a split into an existing folder; the split is whole after `finish`.

    Padding has token 0 and is an ignored label; the blank identifier is 0.
    """

    def __init__(self, folder: Path, alphabet: Alphabet) -> None:
        self.folder, self.alphabet = folder, alphabet
        self.cells = alphabet.shape[0] * alphabet.shape[1]
        self._inputs = _Rows(array_file(folder, SET, array="inputs"), self.cells)
        self._labels = _Rows(array_file(folder, SET, array="labels"), self.cells)
        self._sizes: list[int] = []
        self._identifiers: list[int] = []
        self._ends = [0]

    def add(self, group: Group) -> None:
        """Write a group behind those before."""
        self._inputs.add(group.inputs)
        self._labels.add(group.labels)
        n = len(group.inputs)
        self._sizes += group.sizes if group.sizes is not None else [1] * n
        self._identifiers += group.identifiers if group.identifiers is not None else [0] * n
        self._ends.append(len(self._sizes))

    def finish(self, num_puzzle_identifiers: int | None = None) -> Facts:
        """What `dataset.json` says; the number of identifiers is one more than the largest where it is not given."""
        self._inputs.close()
        self._labels.close()
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


def write_folder(
    folder: Path, groups: Iterable[Group], *, alphabet: Alphabet, num_puzzle_identifiers: int | None = None
) -> Facts:
    """Write a split of these groups into the existing folder `folder`."""
    writer = SplitWriter(folder, alphabet)
    for group in groups:
        writer.add(group)
    return writer.finish(num_puzzle_identifiers)


class _Rows:
    """An array on disk that grows; its header has room for any number of rows."""

    def __init__(self, path: Path, cells: int) -> None:
        self.cells, self.n = cells, 0
        self.file: BinaryIO = path.open("wb")
        self._write_header()

    def add(self, rows: NDArray[np.uint8]) -> None:
        assert rows.dtype == np.uint8, rows.dtype
        assert rows.shape[1:] == (self.cells,), rows.shape
        self.n += len(rows)
        self.file.write(np.ascontiguousarray(rows).tobytes())

    def close(self) -> None:
        self.file.seek(0)
        self._write_header()
        self.file.close()

    def _write_header(self) -> None:
        # numpy leaves room behind the header for a first axis of 21 digits (numpy.lib.format.GROWTH_AXIS_MAX_DIGITS).
        header = {"descr": "|u1", "fortran_order": False, "shape": (self.n, self.cells)}
        npy.write_array_header_1_0(self.file, header)
