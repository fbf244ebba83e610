"""Puzzles measured without learning: figures after each segment and where the model would halt, answers, ARC votes.

Every rank measures its share of the rows; rows of padding count for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sftplay import log
from sftplay.config.schema.hrm import HrmConfig
from sftplay.data.puzzles.folder import PuzzleFolder
from sftplay.data.puzzles.sampler import Rows, TestRows
from sftplay.data.puzzles.written.grid import GridText
from sftplay.data.records import IGNORE_INDEX
from sftplay.tasks.hrm.act import wants_to_halt
from sftplay.tasks.hrm.gathering import objects_on
from sftplay.tasks.hrm.network.model import PuzzleModel
from sftplay.tasks.hrm.solve import refined
from sftplay.tasks.hrm.voting import Voting, is_arc

SHOWN = 64
"""Puzzles whose answers are kept for people, spread over all of them."""

FIGURES = ("exact_accuracy", "accuracy", "q_halt_accuracy", "blank_accuracy")


class Measured(NamedTuple):
    """One measurement; on ranks other than the main one `lines` is empty."""

    figures: dict[str, Any]
    lines: list[dict[str, Any]]


class Solved(NamedTuple):
    """What a model makes of a batch of puzzles."""

    sums: Tensor
    """fp64 [n_supervision + 1, 6]: sums over the rows that count, after each segment and, last, where each row halts:
    right puzzles, shares of right cells, right judgements of q_halt; rows, and in the last line segments; of the cells
    that the question does not give the right ones, and all."""

    predicted: Tensor
    """int64 [batch, cells]: the answer, as `hrm.eval_halt` says."""

    halts: Tensor
    """int64 [batch]: segments after which the model would halt."""

    q_halt: Tensor
    """fp32 [batch]: its judgement of `predicted`, before the sigmoid."""


def measure(
    model: PuzzleModel,
    puzzles: PuzzleFolder,
    *,
    hrm: HrmConfig,
    at_once: int,
    limit: int | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Measured:
    """Measure up to `limit` puzzles, `at_once` of them on each rank at a time. All ranks call it.

    `hrm` says where an answer is taken (`eval_halt`). `progress` is called with the number of puzzles that are done.

    Raises:
        DataError: puzzles of ARC lie there without the names of their copies.
    """
    device = model.start_high.device
    sums = torch.zeros(model.hrm.n_supervision + 1, 6, dtype=torch.float64, device=device)
    total = min(len(puzzles), limit or len(puzzles))
    stride, writing = max(1, total // SHOWN), GridText.of(puzzles.facts)
    lines: list[dict[str, Any]] = []
    # The votes of some of the copies would be others.
    voting = Voting(puzzles) if limit is None and is_arc(puzzles) else None
    was_training, done, batch = model.training, 0, at_once * log.world_size()
    model.eval()
    for rows in TestRows(puzzles, global_batch=batch, rank=log.rank(), world=log.world_size()):
        if done >= total:
            break
        solved = solve_rows(model, rows, eval_halt=hrm.eval_halt)
        sums += solved.sums
        done += batch
        lines += _lines(rows, solved, writing=writing, stride=stride)
        if voting is not None:
            predicted, q_halt = solved.predicted.to(torch.uint8), solved.q_halt.float()
            voting.add(rows, predicted.cpu().numpy(), q_halt=q_halt.cpu().numpy())
        progress(min(done, total))
    model.train(was_training)
    if log.world_size() > 1:
        torch.distributed.all_reduce(sums)
    figures = described(sums, hrm.eval_halt)
    if voting is not None:
        figures |= voting.figures()
    shown = sorted((line for rank in objects_on(0, lines) for line in rank), key=lambda line: line["row"])
    return Measured(figures, shown[:SHOWN])


@torch.no_grad()
def solve_rows(model: PuzzleModel, rows: Rows, *, eval_halt: str) -> Solved:
    """Refine the rows segment by segment."""
    device = model.start_high.device
    inputs, labels, identifiers, mask = (
        torch.from_numpy(each).to(device) for each in (rows.inputs, rows.labels, rows.puzzle_identifiers, rows.mask)
    )
    labels, known = labels.long(), labels != IGNORE_INDEX
    blank = known & (inputs != labels)
    lines, halted = [], torch.zeros(len(mask), dtype=torch.int64, device=device)
    at_halt: Tensor | None = None
    predicted = q_halt = torch.empty(0, device=device)
    for number, answer in enumerate(refined(model, inputs.long(), identifiers=identifiers.long()), 1):
        said = answer.logits.argmax(dim=-1)
        is_right = (said == labels) & known
        right = is_right.sum(dim=-1)
        whole = right == known.sum(dim=-1)
        share = right / known.sum(dim=-1).clamp(min=1)
        judged = (answer.q_halt >= 0) == whole
        parts = (whole, share, judged, torch.ones_like(share), (is_right & blank).sum(dim=-1), blank.sum(dim=-1))
        line = torch.stack([each.double() for each in parts])
        lines.append((line * mask).sum(dim=-1))
        first = number == 1
        goes_on = torch.ones_like(mask) if first else halted == 0
        ends = goes_on & (wants_to_halt(answer, model.hrm) | (number == model.hrm.n_supervision))
        halted = torch.where(ends, number, halted)
        at_halt = line if at_halt is None else torch.where(goes_on, line, at_halt)
        takes = goes_on if eval_halt == "q" else torch.ones_like(goes_on)
        predicted = said if first else torch.where(takes[:, None], said, predicted)
        q_halt = answer.q_halt if first else torch.where(takes, answer.q_halt, q_halt)
    assert at_halt is not None
    at_halt[3] = halted.double()
    return Solved(torch.stack([*lines, (at_halt * mask).sum(dim=-1)]), predicted, halted, q_halt)


def _lines(rows: Rows, solved: Solved, *, writing: GridText, stride: int) -> list[dict[str, Any]]:
    """Some of the puzzles for people, as eval/*.jsonl has them."""
    lines = []
    for place, row in enumerate(rows.rows.tolist()):
        if row < 0 or row % stride:
            continue
        labels, predicted = rows.labels[place], solved.predicted[place].cpu().numpy()
        known = labels != IGNORE_INDEX
        lines.append(
            {
                "row": row,
                "prompt": writing.write(rows.inputs[place]),
                "reference": writing.write(np.where(known, labels, -1)),
                "prediction": writing.write(predicted),
                "correct": bool((predicted == labels)[known].all()),
                "halted_after": int(solved.halts[place]),
            }
        )
    return lines


def described(sums: Tensor, eval_halt: str) -> dict[str, Any]:
    """The figures of a measurement; those of `eval_halt` stand first, those of both ways below."""
    *segments, at_halt = sums.tolist()
    n = segments[0][3]
    figures = [_shares(line, n) for line in segments]
    halting = {**_shares(at_halt, n), "segments": at_halt[3] / max(n, 1)}
    chosen = halting if eval_halt == "q" else figures[-1]
    return {"n": int(n), **{name: chosen[name] for name in FIGURES}, "segments": figures, "halting_q": halting}


def _shares(line: list[float], n: float) -> dict[str, float]:
    of_puzzles = (value / max(n, 1) for value in line[:3])
    return dict(zip(FIGURES, (*of_puzzles, line[4] / max(line[5], 1)), strict=True))
