"""Measure a finished run of puzzles, and solve one puzzle with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sftplay import log
from sftplay.config.run import RunConfig
from sftplay.errors import DataError, nearest_names
from sftplay.launch.run_folder import RunFolder
from sftplay.tasks.hrm.act import wants_to_halt
from sftplay.tasks.hrm.measuring import measure, refined
from sftplay.tasks.hrm.network import PuzzleModel, load_model
from sftplay.tasks.hrm.puzzles.arc import LARGEST, cropped, on_canvas, read_names
from sftplay.tasks.hrm.puzzles.folder import PuzzleFolder
from sftplay.tasks.hrm.puzzles.sampler import open_split
from sftplay.tasks.hrm.puzzles.sudoku import GridText
from sftplay.tasks.hrm.task import open_puzzles
from sftplay.train.metrics import write_measured


def measure_finished(cfg: RunConfig, folder: RunFolder, *, split: str, limit: int | None, path: Path) -> dict[str, Any]:
    """Measure the result on the held-out puzzles, or on those of data.test_path for the split `test`.

    The figures are also written to `path`, with some answers next to it. Raise DataError where nothing is held out, and
    where the puzzles or the result are not sound, or not of the same kind.
    """
    if split == "test":
        puzzles = open_split(str(cfg.data.test_path), "test", key="data.test_path")
    else:
        _, held_out = open_puzzles(cfg)
        if held_out is None:
            raise DataError("no held-out puzzles to measure on", where="data", fix="set data.val_path")
        puzzles = held_out
    model = _load_model(folder, puzzles, device="cuda" if torch.cuda.is_available() else "cpu")
    n = min(len(puzzles), limit or len(puzzles))
    measured = measure(
        model, puzzles, hrm=cfg.hrm, at_once=min(256, n), limit=limit,
        progress=lambda done: log.progress(done, n, what="puzzles measured", tag="eval"),
    )  # fmt: skip
    write_measured(path, measured.figures, lines=measured.lines)
    return measured.figures


def _load_model(folder: RunFolder, puzzles: PuzzleFolder, *, device: str = "cpu") -> PuzzleModel:
    model = load_model(folder.path / "model", device=device)
    kind = {"cells": model.grid.cells, "words": model.grid.vocab_size, "identifiers": model.grid.identifiers}
    puzzles.expect_kind(**kind, of="the run's model")
    return model


def figures_table(figures: dict[str, Any]) -> str:
    """Format the figures: a line for each segment, one for where the model halts, one for each pass@k."""
    lines = [f"{figures['n']:,} puzzles      solved   blanks    cells   judged"]
    named = [(f"segment {number}", segment) for number, segment in enumerate(figures["segments"], 1)]
    named.append((f"halts at {figures['halting_q']['segments']:.2f}", figures["halting_q"]))
    for name, measured in named:
        shares = (measured[key] for key in ("exact_accuracy", "blank_accuracy", "accuracy", "q_halt_accuracy"))
        lines.append(f"{name:16}" + "".join(f"{share:9.4f}" for share in shares))
    partial = figures.get("pass_at_partial", {})
    lines += ["            whole tasks   inputs"] if "pass_at" in figures else []
    lines += [f"pass@{k:11}{share:9.4f}{partial[k]:9.4f}" for k, share in figures.get("pass_at", {}).items()]
    return "\n".join(lines)


PUZZLE = "puzzle:"
"""Begins the first line where the model has learned an identifier for each puzzle."""


def solve_text(cfg: RunConfig, folder: RunFolder, *, text: str, where: str) -> tuple[str, str]:
    """Solve the puzzle in a text of the file `where`; return the answer, and what is to be said of it.

    Raise DataError where it is no puzzle of the kind that the run has learned.
    """
    puzzles, _ = open_puzzles(cfg)
    model = _load_model(folder, puzzles)
    writing = GridText.from_facts(puzzles.facts)
    question, identifier = read_question(text, puzzles, writing=writing, where=where)
    inputs, identifiers = torch.from_numpy(question)[None], torch.tensor([identifier])
    halts, chance, tokens = 0, 0.0, question
    for number, answer in enumerate(refined(model, inputs, identifiers=identifiers), 1):
        tokens, chance = answer.logits[0].argmax(dim=-1).numpy(), float(answer.q_halt[0].sigmoid())
        if not halts and bool(wants_to_halt(answer, model.hrm)[0]):
            halts = number
        if halts and cfg.hrm.eval_halt == "q":
            break
    remarks = [f"right with {chance:.0%} by its own judgement", f"it would halt after {halts}" if halts else "unsure"]
    if writing.is_sudoku:
        changed = (question != tokens) & (question != writing.symbols.index("."))
        broken = writing.breaks_rules(tokens)
        remarks.append("breaks a rule of Sudoku" if broken else "follows the rules of Sudoku")
        remarks += ["it changes a given cell"] if changed.any() else []
    if writing.kind == "arc":
        rows = ["".join(map(str, row)) for row in cropped(tokens).tolist()]
        written = "\n".join(rows) or "(no grid in the corner)"
    else:
        written = writing.write(tokens)
    return written, f"after {number} segments: {', '.join(remarks)}"


def read_question(text: str, puzzles: PuzzleFolder, *, writing: GridText, where: str) -> tuple[NDArray[np.int64], int]:
    """Read the puzzle in a text: its tokens and its identifier.

    Where the model has learned an identifier for each puzzle, the first line names one.
    """
    facts, identifier = puzzles.facts, puzzles.facts.blank_identifier_id
    lines = text.splitlines()
    if facts.num_puzzle_identifiers > 1:
        first, names = lines[0] if lines else "", read_names(puzzles.path)
        name = first.removeprefix(PUZZLE).strip()
        if not first.startswith(PUZZLE) or name not in names:
            near = nearest_names(name, names) if first.startswith(PUZZLE) else []
            guess = f"did you mean {near[0]}? " if near else f"write {PUZZLE} NAME, a name in identifiers.json. "
            raise DataError(
                f"names no puzzle that was learned: {first[:60]!r}",
                where=f"{where}:1",
                fix=f"{guess}A puzzle that was not in training has no embedding: train on its demonstrations first",
                nearest=near,
            )
        identifier, lines[0] = names.index(name), ""
    if facts.kind == "arc":
        return on_canvas(_read_colours(lines, where)).astype(np.int64), identifier
    rest = "\n".join(lines[1:]) if facts.num_puzzle_identifiers > 1 else text
    return writing.read(rest, cells=facts.seq_len, where=where), identifier


def _read_colours(lines: list[str], where: str) -> NDArray[np.uint8]:
    rows = [(number, "".join(line.split())) for number, line in enumerate(lines, 1) if line.strip()]
    width = len(rows[0][1]) if rows else 0
    if not rows or max(len(rows), width) > LARGEST:
        what = f"has a grid of {len(rows)} x {width}"
        raise DataError(what, where=where, fix=f"write 1 to {LARGEST} lines of 1 to {LARGEST} digits")
    for number, line in rows:
        if len(line) != width or not (line.isascii() and line.isdecimal()):
            what = f"is no row of {width} colours 0 to 9: {line[:60]!r}"
            raise DataError(what, where=f"{where}:{number}", fix="correct the line")
    return np.array([list(map(int, line)) for _, line in rows], np.uint8)
