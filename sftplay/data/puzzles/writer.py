"""Writes a split of puzzles, group by group: no more than a group is in memory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

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


def write_folder(
    folder: Path, groups: Iterable[Group], *, alphabet: Alphabet, num_puzzle_identifiers: int | None = None
) -> Facts:
    """Write a split into the existing folder `folder`; what `dataset.json` says of it.

    Padding has token 0 and is an ignored label; the blank identifier is 0. `num_puzzle_identifiers` is one more than
    the largest identifier where it is not given.
    """
    sizes: list[int] = []
    identifiers: list[int] = []
    ends = [0]
    cells = alphabet.shape[0] * alphabet.shape[1]
    with (
        _Rows(array_file(folder, SET, array="inputs"), cells) as inputs,
        _Rows(array_file(folder, SET, array="labels"), cells) as labels,
    ):
        for group in groups:
            inputs.add(group.inputs)
            labels.add(group.labels)
            sizes += group.sizes if group.sizes is not None else [1] * len(group.inputs)
            identifiers += group.identifiers if group.identifiers is not None else [0] * len(group.inputs)
            ends.append(len(sizes))
    np.save(array_file(folder, SET, array="puzzle_identifiers"), np.asarray(identifiers, np.int32))
    np.save(array_file(folder, SET, array="puzzle_indices"), np.cumsum([0, *sizes], dtype=np.int64))
    np.save(array_file(folder, SET, array="group_indices"), np.asarray(ends, np.int64))
    facts = Facts(
        pad_id=0, ignore_label_id=0, blank_identifier_id=0, vocab_size=len(alphabet.symbols), seq_len=cells,
        num_puzzle_identifiers=num_puzzle_identifiers or max(identifiers, default=0) + 1, total_groups=len(ends) - 1,
        mean_puzzle_examples=sum(sizes) / max(1, len(sizes)), sets=(SET,), kind=alphabet.kind, shape=alphabet.shape,
        symbols=alphabet.symbols,
    )  # fmt: skip
    (folder / FACTS).write_text(json.dumps(asdict(facts), indent=1) + "\n", encoding="utf-8")
    return facts


class _Rows:
    """An array on disk that grows; its header has room for any number of rows."""

    def __init__(self, path: Path, cells: int) -> None:
        self.cells, self.n = cells, 0
        self.file: BinaryIO = path.open("wb")
        self._write_header()

    def __enter__(self) -> _Rows:
        return self

    def add(self, rows: NDArray[np.uint8]) -> None:
        assert rows.dtype == np.uint8, rows.dtype
        assert rows.shape[1:] == (self.cells,), rows.shape
        self.n += len(rows)
        self.file.write(np.ascontiguousarray(rows).tobytes())

    def __exit__(self, *error: Any) -> None:
        self.file.seek(0)
        self._write_header()
        self.file.close()

    def _write_header(self) -> None:
        # numpy leaves room behind the header for a first axis of 21 digits (numpy.lib.format.GROWTH_AXIS_MAX_DIGITS).
        header = {"descr": "|u1", "fortran_order": False, "shape": (self.n, self.cells)}
        npy.write_array_header_1_0(self.file, header)
