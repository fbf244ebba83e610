"""Puzzles refined segment by segment without learning."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

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
