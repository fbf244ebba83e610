"""Deep supervision with adaptive halting: the losses, and what a training step does with a batch of puzzles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from sftplay.data.records import IGNORE_INDEX
from sftplay.tasks.hrm.network import PuzzleModel, SegmentOutput, State
from sftplay.tasks.hrm.section import HrmConfig


def log_stablemax(scores: Tensor) -> Tensor:
    """Compute log(s(x) / sum of s) over the last dimension; s(x) is x + 1 from 0 on and 1 / (1 - x) below it.

    s is never 0, and its logarithm is log1p(x) or -log1p(-x): nothing overflows.
    """
    logs = torch.where(scores >= 0, torch.log1p(scores.clamp(min=0)), -torch.log1p(-scores.clamp(max=0)))
    return logs - logs.logsumexp(dim=-1, keepdim=True)


def cell_losses(logits: Tensor, labels: Tensor, *, hrm: HrmConfig) -> Tensor:
    """Compute the mean loss over the labelled cells of each row, [batch]; 0 for a row without a label."""
    scores = logits.to(torch.float64 if hrm.loss_precision == "fp64" else torch.float32)
    logs = log_stablemax(scores) if hrm.loss == "stablemax" else scores.log_softmax(dim=-1)
    known = labels != IGNORE_INDEX
    picked = logs.gather(-1, labels.clamp(min=0).long().unsqueeze(-1)).squeeze(-1)
    return -(picked * known).sum(dim=-1) / known.sum(dim=-1).clamp(min=1)


def q_losses(q: Tensor, target: Tensor) -> Tensor:
    """Compute the binary cross-entropy of a Q value before its sigmoid, [batch]."""
    return functional.binary_cross_entropy_with_logits(q, target.to(q.dtype), reduction="none")


FIGURES = (
    "count", "accuracy", "exact_accuracy", "q_halt_accuracy", "steps", "lm_loss", "q_halt_loss", "q_continue_loss",
)  # fmt: skip
"""What a segment is described by: sums over its rows. All but the losses are of rows that have halted."""


class Puzzles(NamedTuple):
    """Rows of puzzles: int64 [batch, cells] twice, and int64 [batch]. IGNORE_INDEX is a cell without a label."""

    inputs: Tensor
    labels: Tensor
    identifiers: Tensor


class Carry(NamedTuple):
    """The state that a step hands to the next one.

    `steps`, int64 [batch], are the segments that the row's puzzle has had; a row that has `halted`, bool [batch], takes
    another puzzle.
    """

    state: State
    steps: Tensor
    halted: Tensor
    puzzles: Puzzles

    def rows(self, part: slice) -> Carry:
        """Select some of the rows."""
        state, puzzles = State(*(t[part] for t in self.state)), Puzzles(*(t[part] for t in self.puzzles))
        return Carry(state, self.steps[part], self.halted[part], puzzles)


class Segment(NamedTuple):
    """The results of a step: `losses` are [batch], with gradient, and `figures` fp64 [len(FIGURES)]."""

    carry: Carry
    answer: SegmentOutput
    losses: Tensor
    figures: Tensor


def all_halted(model: PuzzleModel, batch: int, *, device: torch.device | str = "cpu") -> Carry:
    """Create the carry before the first step: every row takes a puzzle."""
    cells = torch.zeros(batch, model.grid.cells, dtype=torch.int64, device=device)
    numbers = torch.zeros(batch, dtype=torch.int64, device=device)
    state = State(*(part.clone() for part in model.start(batch)))
    return Carry(state, numbers, numbers == 0, Puzzles(cells, cells, numbers))


def concatenate(parts: list[Carry]) -> Carry:
    """Concatenate the rows of several carries."""
    if len(parts) == 1:
        return parts[0]
    state = State(*map(torch.cat, zip(*(part.state for part in parts), strict=True)))
    puzzles = Puzzles(*map(torch.cat, zip(*(part.puzzles for part in parts), strict=True)))
    return Carry(state, torch.cat([p.steps for p in parts]), torch.cat([p.halted for p in parts]), puzzles)


def reset_halted(carry: Carry, fresh: Puzzles, *, model: PuzzleModel) -> Carry:
    """Give halted rows the puzzles of `fresh` and the start state; the others stay as they are.

    Puzzles at the places of other rows are dropped.
    """
    halted, at_start = carry.halted, model.start(len(carry.halted))

    def choose(new: Tensor, old: Tensor) -> Tensor:
        return torch.where(halted.view(-1, *(1 for _ in new.shape[1:])), new, old)

    state = State(*map(choose, at_start, carry.state))
    puzzles = Puzzles(*map(choose, fresh, carry.puzzles))
    return Carry(state, torch.where(halted, 0, carry.steps), halted, puzzles)


def least_segments(hrm: HrmConfig, batch: int, *, seed: int, step: int) -> Tensor:
    """Choose the least number of segments of each row of the whole batch before it may halt, int64 [batch].

    It is 0, and with the probability `hrm.halt_exploration` a number from 2 to n_supervision. It follows from seed and
    step alone, so that any number of processes explores alike, and a resumed run goes on alike.
    """
    if hrm.n_supervision == 1 or not hrm.halt_exploration:
        return torch.zeros(batch, dtype=torch.int64)
    stream = torch.Generator().manual_seed(seed * 2**31 + step)
    explores = torch.rand(batch, generator=stream) < hrm.halt_exploration
    drawn = torch.randint(2, hrm.n_supervision + 1, (batch,), generator=stream)
    return torch.where(explores, drawn, 0)


def wants_to_halt(answer: SegmentOutput, hrm: HrmConfig) -> Tensor:
    """Return bool [batch]: halting is worth more than going on; without that, the answer is probably right."""
    return answer.q_halt > (answer.q_continue if hrm.q_continue else 0)


def halts(answer: SegmentOutput, steps: Tensor, *, hrm: HrmConfig, at_least: Tensor) -> Tensor:
    """Return bool [batch]: which rows halt after their `steps` segments, in training."""
    is_last = steps >= hrm.n_supervision
    if hrm.n_supervision == 1:
        return is_last
    return (is_last | wants_to_halt(answer, hrm)) & (steps >= at_least)


def compute_continue_target(next_answer: SegmentOutput, is_last: Tensor) -> Tensor:
    """Return the target of q_continue: what the segment after this one promises, [batch]."""
    best = torch.maximum(next_answer.q_halt, next_answer.q_continue)
    return torch.where(is_last, next_answer.q_halt, best).sigmoid()


def run_segment(
    model: PuzzleModel, carry: Carry, *, at_least: Tensor, compute: Callable[..., Any] | None = None
) -> Segment:
    """Run one segment of every row of a carry that `reset_halted` has made, and compute its losses.

    `compute` is the compiled model, where there is one.
    """
    compute, hrm, puzzles = model if compute is None else compute, model.hrm, carry.puzzles
    rows = model.puzzles(puzzles.identifiers) if model.puzzles is not None else None
    state, answer = compute(carry.state, puzzles.inputs, puzzle_rows=rows)
    steps = carry.steps + 1
    known = puzzles.labels != IGNORE_INDEX
    right = (answer.logits.detach().argmax(dim=-1) == puzzles.labels) & known
    is_whole = right.sum(dim=-1) == known.sum(dim=-1)
    cells, halting = cell_losses(answer.logits, puzzles.labels, hrm=hrm), q_losses(answer.q_halt, is_whole)
    continuing = torch.zeros_like(halting)
    if hrm.looks_ahead:
        with torch.no_grad():
            _, next_answer = compute(state, puzzles.inputs, puzzle_rows=rows, judges_alone=True)
        continuing = q_losses(answer.q_continue, compute_continue_target(next_answer, steps >= hrm.n_supervision))
    # A row without a label is padding: nothing is learned from it.
    counts = known.any(dim=-1)
    losses = (cells + 0.5 * (halting + continuing)) * counts
    with torch.no_grad():
        halted = halts(answer, steps, hrm=hrm, at_least=at_least)
        ended = halted & counts
        share = right.sum(dim=-1) / known.sum(dim=-1).clamp(min=1)
        judged_well = (answer.q_halt >= 0) == is_whole
        rates = (ended, share * ended, is_whole & ended, judged_well & ended, steps * ended)
        parts = (*rates, cells * counts, halting * counts, continuing * counts)
        figures = torch.stack([part.double().sum() for part in parts])
    return Segment(Carry(state, steps, halted, puzzles), answer, losses, figures)
