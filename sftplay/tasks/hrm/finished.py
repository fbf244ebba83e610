"""Measure a finished run of puzzles, and solve one puzzle with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sftplay import log
from sftplay.config.run import RunConfig
from sftplay.data.puzzles.arc import cropped, on_canvas
from sftplay.data.puzzles.arc_votes import read_names
from sftplay.data.puzzles.find import open_split
from sftplay.data.puzzles.folder import PuzzleFolder
from sftplay.data.puzzles.written_grid import GridText
from sftplay.errors import DataError, nearest_names
from sftplay.launch.run_folder import RunFolder
from sftplay.tasks.hrm.act import wants_to_halt
from sftplay.tasks.hrm.evaluation import write_measured
from sftplay.tasks.hrm.measuring import measure, refined
from sftplay.tasks.hrm.published import expect_its_kind, load_model
from sftplay.tasks.hrm.task import open_puzzles

AT_ONCE = 256
"""Puzzles that are refined at the same time."""


def measure_finished(cfg: RunConfig, folder: RunFolder, *, split: str, limit: int | None, path: Path) -> dict[str, Any]:
    """The figures of the result on the held-out puzzles, or on those of data.test_path for the split `test`; also
    written to `path`, with some answers beside it.

    Raises:
        DataError: nothing is held out; the puzzles or the result are not sound, or not of the same kind.
    """
    puzzles = _held_out(cfg, split=split)
    model = load_model(folder.path / "model", device=_device())
    expect_its_kind(model, puzzles)
    n = min(len(puzzles), limit or len(puzzles))
    measured = measure(
        model, puzzles, hrm=cfg.hrm, at_once=min(AT_ONCE, n), limit=limit,
        progress=lambda done: log.progress(done, n, what="puzzles measured", tag="eval"),
    )  # fmt: skip
    write_measured(path, measured)
    return measured.figures


def figures_table(figures: dict[str, Any]) -> str:
    """The figures for a terminal: a line for each segment, one for where the model halts, one for each pass@k."""
    lines = [f"{figures['n']:,} puzzles      solved   blanks    cells   judged"]
    named = [(f"segment {number}", each) for number, each in enumerate(figures["segments"], 1)]
    named.append((f"halts at {figures['halting_q']['segments']:.2f}", figures["halting_q"]))
    for name, each in named:
        shares = (each[key] for key in ("exact_accuracy", "blank_accuracy", "accuracy", "q_halt_accuracy"))
        lines.append(f"{name:16}" + "".join(f"{share:9.4f}" for share in shares))
    partial = figures.get("pass_at_partial", {})
    lines += ["            whole tasks   inputs"] if "pass_at" in figures else []
    lines += [f"pass@{k:11}{share:9.4f}{partial[k]:9.4f}" for k, share in figures.get("pass_at", {}).items()]
    return "\n".join(lines)


def _held_out(cfg: RunConfig, *, split: str) -> PuzzleFolder:
    if split == "test":
        return open_split(str(cfg.data.test_path), "test", key="data.test_path")
    _, held_out = open_puzzles(cfg)
    if held_out is None:
        raise DataError("no held-out puzzles to measure on", where="data", fix="set data.val_path")
    return held_out


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


PUZZLE = "puzzle:"
"""Begins the first line where the model has learned an identifier for each puzzle."""

LARGEST = 30
"""Rows or columns of a grid of ARC."""


class Question(NamedTuple):
    """A puzzle as the model takes it."""

    tokens: NDArray[np.int64]
    identifier: int


class Solution(NamedTuple):
    """The answer, and what is to be said of it."""

    text: str
    said: str


def solve_text(cfg: RunConfig, folder: RunFolder, *, text: str, where: str) -> Solution:
    """The solution of the puzzle in a text of the file `where`.

    Raises:
        DataError: it is no puzzle of the kind that the run has learned.
    """
    puzzles, _ = open_puzzles(cfg)
    model = load_model(folder.path / "model")
    expect_its_kind(model, puzzles)
    writing = GridText.from_facts(puzzles.facts)
    question = read_question(text, puzzles, writing=writing, where=where)
    inputs, identifiers = torch.from_numpy(question.tokens)[None], torch.tensor([question.identifier])
    halts, chance, tokens = 0, 0.0, question.tokens
    for number, answer in enumerate(refined(model, inputs, identifiers=identifiers), 1):
        tokens, chance = answer.logits[0].argmax(dim=-1).numpy(), float(answer.q_halt[0].sigmoid())
        if not halts and bool(wants_to_halt(answer, model.hrm)[0]):
            halts = number
        if halts and cfg.hrm.eval_halt == "q":
            break
    told = [f"right with {chance:.0%} by its own judgement", f"it would halt after {halts}" if halts else "unsure"]
    if writing.is_sudoku:
        changed = (question.tokens != tokens) & (question.tokens != writing.symbols.index("."))
        broken = writing.breaks_rules(tokens)
        told.append("breaks a rule of Sudoku" if broken else "follows the rules of Sudoku")
        told += ["it changes a given cell"] if changed.any() else []
    return Solution(_written(tokens, writing), f"after {number} segments: {', '.join(told)}")


def read_question(text: str, puzzles: PuzzleFolder, *, writing: GridText, where: str) -> Question:
    """The puzzle in a text. Where the model has learned an identifier for each puzzle, the first line names one."""
    facts, identifier = puzzles.facts, puzzles.facts.blank_identifier_id
    lines = text.splitlines()
    if facts.num_puzzle_identifiers > 1:
        identifier = _identifier(lines[0] if lines else "", puzzles, where=where)
        lines[0] = ""
    if facts.kind == "arc":
        return Question(on_canvas(_colours(lines, where)).astype(np.int64), identifier)
    rest = "\n".join(lines[1:]) if facts.num_puzzle_identifiers > 1 else text
    return Question(writing.read(rest, cells=facts.seq_len, where=where), identifier)


def _identifier(line: str, puzzles: PuzzleFolder, *, where: str) -> int:
    names = read_names(puzzles.path)
    name = line.removeprefix(PUZZLE).strip()
    if line.startswith(PUZZLE) and name in names:
        return names.index(name)
    what = f"names no puzzle that was learned: {line[:60]!r}"
    near = nearest_names(name, names) if line.startswith(PUZZLE) else []
    guess = f"did you mean {near[0]}? " if near else f"write {PUZZLE} NAME, a name in identifiers.json. "
    fix = guess + "A puzzle that was not in training has no embedding: train on its demonstrations first"
    raise DataError(what, where=f"{where}:1", fix=fix, nearest=near)


def _colours(lines: list[str], where: str) -> NDArray[np.uint8]:
    rows = [(number, "".join(line.split())) for number, line in enumerate(lines, 1) if line.strip()]
    width = len(rows[0][1]) if rows else 0
    if not rows or max(len(rows), width) > LARGEST:
        what = f"has a grid of {len(rows)} x {width}"
        raise DataError(what, where=where, fix=f"write 1 to {LARGEST} lines of 1 to {LARGEST} digits")
    for number, line in rows:
        if len(line) != width or not (line.isascii() and line.isdecimal()):
            what = f"is no row of {width} colours 0 to 9: {line[:60]!r}"
            raise DataError(what, where=f"{where}:{number}", fix="correct the line")
    return np.array([[int(each) for each in line] for _, line in rows], np.uint8)


def _written(tokens: NDArray[np.int64], writing: GridText) -> str:
    if writing.kind != "arc":
        return writing.write(tokens)
    return "\n".join("".join(map(str, row)) for row in cropped(tokens).tolist()) or "(no grid in the corner)"
