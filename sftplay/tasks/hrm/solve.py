"""Puzzles refined segment by segment without learning: the answer after each, and where the model would halt."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sftplay.tasks.hrm.act import wants_to_halt
from sftplay.tasks.hrm.network.model import Answer, PuzzleModel


def refined(model: PuzzleModel, inputs: Tensor, *, identifiers: Tensor) -> Iterator[Answer]:
    """The answer after each of the model's `n_supervision` segments, none of them left out.

    `inputs` are int64 [batch, cells], `identifiers` int64 [batch]. Grad mode is off while a segment runs.
    """
    state = model.start(len(inputs))
    with torch.no_grad():
        rows = model.puzzles(identifiers) if model.puzzles is not None else None
    for _ in range(model.hrm.n_supervision):
        with torch.no_grad():
            state, answer = model(state, inputs, puzzle_rows=rows)
        yield answer


def first_halts(model: PuzzleModel, answers: list[Answer]) -> Tensor:
    """int64 [batch]: the segment, from 0, after which the model would halt; the last one where it never would."""
    wants = torch.stack([wants_to_halt(answer, model.hrm) for answer in answers])
    wants[-1] = True
    return wants.int().argmax(dim=0)
