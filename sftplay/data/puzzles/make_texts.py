"""Files of puzzles with a question and an answer as texts: csv, jsonl and all that training reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sftplay import log
from sftplay.data.puzzles.kind import Cells, PuzzleKind
from sftplay.data.read.files import SUFFIXES, find_suffix
from sftplay.data.read.sources import read_rows
from sftplay.data.records import Refused
from sftplay.errors import MOST_PROBLEMS, DataError, SeveralErrors

QUESTION = ("q", "question", "puzzle", "puzzles", "quiz", "quizzes")
ANSWER = ("a", "answer", "solution", "solutions")
"""Names of the columns, in this order."""

FIX_LINE = "correct the line, or take it out"


@dataclass(frozen=True)
class Puzzles:
    path: str
    lines: NDArray[np.int64]
    questions: Cells
    answers: Cells

    def __len__(self) -> int:
        return len(self.lines)

    def take(self, rows: NDArray[Any]) -> Puzzles:
        return Puzzles(self.path, self.lines[rows], self.questions[rows], self.answers[rows])

    def place(self, row: int) -> str:
        return f"{self.path}:{self.lines[row]}"


def find_files(source: Path) -> dict[str, Path]:
    """Find `train` and `test` of a folder with files of these names, or `all` for a single file.
    Raise DataError where a folder lacks one of the two.
    """
    if not source.is_dir():
        return {"all": source}
    found = {}
    for split in ("train", "test"):
        named = [source / f"{split}{suffix}" for suffix in SUFFIXES if (source / f"{split}{suffix}").is_file()]
        if len(named) != 1:
            what = f"holds {len(named) or 'no'} file{'s' * (len(named) > 1)} called {split}"
            others = [path for path in sorted(source.iterdir()) if find_suffix(path)]
            name = f": IN={others[0]}" if len(others) == 1 else " with IN="
            fix = f"put {split}.csv or {split}.csv.gz there, or name one file, which is then split{name}"
            raise DataError(what, where=str(source), fix=fix)
        found[split] = named[0]
    return found


def read_puzzles(file: Path, kind: PuzzleKind) -> Puzzles:
    """Read all puzzles of a file; the meaning of the characters is not checked. Raise SeveralErrors for up to a hundred
    lines that hold no puzzle of this kind, DataError where the file cannot be read, or holds none.
    """
    lines, texts, problems = [], bytearray(), []
    characters = {symbol: symbol for symbol in kind.alphabet.symbols[1:]}  # with that of the alphabet
    characters |= dict.fromkeys(kind.also_blank, kind.alphabet.symbols[1])
    for line, question, answer, what in _read_texts(file, kind, allowed=set(characters)):
        if what:
            problems.append(DataError(what, where=f"{file}:{line}", fix=FIX_LINE))
            if len(problems) > MOST_PROBLEMS:
                break
        else:
            lines.append(line)
            texts += question + answer
        if len(lines) % 20_000 == 0:
            log.progress(len(lines), None, what=f"reading {file.name}", tag="puzzle-data")
    if problems:
        raise SeveralErrors(problems)
    if not lines:
        raise DataError("holds no puzzle", where=str(file), fix="name a file with a question and an answer in each row")
    table = np.zeros(256, np.uint8)
    for character, same in characters.items():
        table[ord(character)] = kind.alphabet.symbols.index(same) - 1
    cells = table[np.frombuffer(bytes(texts), np.uint8)].reshape(len(lines), 2, -1)
    return Puzzles(str(file), np.array(lines), np.ascontiguousarray(cells[:, 0]), np.ascontiguousarray(cells[:, 1]))


def _read_texts(file: Path, kind: PuzzleKind, *, allowed: set[str]) -> Iterator[tuple[int, bytes, bytes, str]]:
    """Yield line, question, answer, and what is wrong with them."""
    n_cells = kind.alphabet.shape[0] * kind.alphabet.shape[1]
    for source, row in read_rows(str(file)):
        if isinstance(row, Refused):
            yield source.line, b"", b"", row.reason
            continue
        question, answer = (next((row[name] for name in names if name in row), None) for names in (QUESTION, ANSWER))
        if question is None or answer is None:
            name, names = ("question", QUESTION) if question is None else ("answer", ANSWER)
            what = f"has no {name}: its columns are {', '.join(row)}"
            raise DataError(what, where=f"{file}:{source.line}", fix=f"call the column one of {', '.join(names)}")
        what = _find_flaw("question", question, allowed=allowed, n_cells=n_cells)
        what = what or _find_flaw("answer", answer, allowed=allowed, n_cells=n_cells)
        yield source.line, *((b"", b"") if what else (question.encode(), answer.encode())), what


def _find_flaw(name: str, text: Any, *, allowed: set[str], n_cells: int) -> str:
    if not isinstance(text, str):
        return f"the {name} is {text!r}, no text"
    if len(text) != n_cells:
        return f"the {name} has {len(text)} characters, not {n_cells}"
    if not allowed.issuperset(text):
        place = next(place for place, character in enumerate(text, 1) if character not in allowed)
        return f"the {name} holds {text[place - 1]!r} at {place}; a cell is one of {''.join(sorted(allowed))!r}"
    return ""
