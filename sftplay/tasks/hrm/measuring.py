"""Measure puzzles without learning, while a run trains and after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sftplay import log
from sftplay.data.records import IGNORE_INDEX
from sftplay.tasks.hrm.act import wants_to_halt
from sftplay.tasks.hrm.network import PuzzleModel, SegmentOutput
from sftplay.tasks.hrm.puzzles.arc import (
    ALPHABET,
    LARGEST,
    Tally,
    assign_share,
    compute_ranks,
    read_asked,
    read_names,
    share_solved,
)
from sftplay.tasks.hrm.puzzles.folder import PuzzleFolder
from sftplay.tasks.hrm.puzzles.sampler import PuzzleBatch, TestBatches
from sftplay.tasks.hrm.puzzles.sudoku import GridText
from sftplay.tasks.hrm.section import HrmConfig
from sftplay.train.eval_mode import random_numbers_kept
from sftplay.train.metrics import EvaluateAtSteps, Observer


def gather_on(rank: int, value: Any) -> list[Any]:
    """Gather each rank's value, in rank order, on `rank`; nothing on others. All ranks call it."""
    if log.world_size() == 1:
        return [value]
    found: list[Any] | None = [None] * log.world_size() if log.rank() == rank else None
    torch.distributed.gather_object(value, found, dst=rank)
    return found or []


def refined(model: PuzzleModel, inputs: Tensor, *, identifiers: Tensor) -> Iterator[SegmentOutput]:
    """Yield the answer after each of the model's `n_supervision` segments, none of them left out.

    `inputs` are int64 [batch, cells], `identifiers` int64 [batch]. Grad mode is off while a segment runs.
    """
    state = model.start(len(inputs))
    with torch.no_grad():
        rows = model.puzzles(identifiers) if model.puzzles is not None else None
    for _ in range(model.hrm.n_supervision):
        with torch.no_grad():
            state, answer = model(state, inputs, puzzle_rows=rows)
        yield answer


def count_votes(tally: Tally, tasks: Mapping[str, Any]) -> dict[str, Any]:
    """Compute pass@k of whole tasks and of test inputs by the votes of all ranks; nothing on other ranks than the main.

    `tally` has the answers of this rank. All ranks call it.
    """
    rank, world, own_tasks = log.rank(), log.world_size(), Tally()
    for owner, share in enumerate(tally.shares(world)):
        for votes in gather_on(owner, share):
            own_tasks.merge(votes)
    ballots = own_tasks.ballots()
    ranks = [compute_ranks(task, ballots) for name, task in tasks.items() if assign_share(name, world) == rank]
    found = [task for share in gather_on(0, ranks) for task in share]
    if not log.is_main():
        return {}
    named = {"pass_at": share_solved([[max(task)] for task in found]), "pass_at_partial": share_solved(found)}
    return {"tasks": len(found)} | {name: {str(k): v for k, v in by_k.items()} for name, by_k in named.items()}


SHOWN = 64
"""Puzzles whose answers are kept for people, spread over all of them."""

FIGURES = ("exact_accuracy", "accuracy", "q_halt_accuracy", "blank_accuracy")


class Measured(NamedTuple):
    """One measurement; on ranks other than the main one `lines` is empty."""

    figures: dict[str, Any]
    lines: list[dict[str, Any]]


class Solved(NamedTuple):
    """The answers of a model to a batch of puzzles.

    `sums`, fp64 [n_supervision + 1, 6], are over the rows that count, after each segment and, last, where each row
    halts: right puzzles, shares of right cells, right judgements of q_halt; rows, and in the last line segments; of the
    cells that the question does not give the right ones, and all. `predicted`, int64 [batch, cells], is the answer, as
    `hrm.eval_halt` says, `halts`, int64 [batch], the segments after which the model would halt, and `q_halt`, fp32
    [batch], its judgement of `predicted`, before the sigmoid.
    """

    sums: Tensor
    predicted: Tensor
    halts: Tensor
    q_halt: Tensor


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
    Raise DataError where puzzles of ARC lie without the names of their copies.
    """
    facts, sums = puzzles.facts, torch.zeros(model.hrm.n_supervision + 1, 6, dtype=torch.float64)
    sums = sums.to(model.start_high.device)
    total = min(len(puzzles), limit or len(puzzles))
    stride, writing = max(1, total // SHOWN), GridText.from_facts(facts)
    lines: list[dict[str, Any]] = []
    looks_like_arc = (facts.seq_len, facts.vocab_size) == (LARGEST**2, len(ALPHABET.symbols))
    if limit is None and looks_like_arc and not facts.kind and facts.num_puzzle_identifiers > 1:
        what = 'no votes are counted: dataset.json names no kind; write "kind": "arc" there, with identifiers.json and'
        log.say(f"{puzzles.path}: {what} test_puzzles.json in the folder above, if these are tasks of ARC", "eval")
    # The votes of some of the copies would be others.
    names, tally = read_names(puzzles.path) if limit is None and facts.kind == "arc" else None, Tally()
    tasks = read_asked(puzzles.path) if names is not None else {}
    was_training, done, batch = model.training, 0, at_once * log.world_size()
    model.eval()
    for rows in TestBatches(puzzles, global_batch=batch, rank=log.rank(), world=log.world_size()):
        if done >= total:
            break
        solved = solve_rows(model, rows, eval_halt=hrm.eval_halt)
        sums += solved.sums
        done += batch
        lines += _lines(rows, solved, writing=writing, stride=stride)
        if names is not None:
            predicted, q_halt = solved.predicted.to(torch.uint8).cpu().numpy(), solved.q_halt.float().cpu().numpy()
            for n in np.flatnonzero(rows.mask):  # without rows of padding
                name = names[rows.puzzle_identifiers[n]]
                tally.add(name, inputs=rows.inputs[n], predicted=predicted[n], q_halt=float(q_halt[n]))
        progress(min(done, total))
    model.train(was_training)
    if log.world_size() > 1:
        torch.distributed.all_reduce(sums)
    figures = described(sums, hrm.eval_halt)
    if names is not None:
        figures |= count_votes(tally, tasks)
    shown = sorted((line for rank in gather_on(0, lines) for line in rank), key=lambda line: line["row"])
    return Measured(figures, shown[:SHOWN])


@torch.no_grad()
def solve_rows(model: PuzzleModel, rows: PuzzleBatch, *, eval_halt: str) -> Solved:
    """Refine the rows segment by segment."""
    arrays, device = (rows.inputs, rows.labels, rows.puzzle_identifiers, rows.mask), model.start_high.device
    inputs, labels, identifiers, mask = (torch.from_numpy(array).to(device) for array in arrays)
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
        line = torch.stack([part.double() for part in parts])
        lines.append((line * mask).sum(dim=-1))
        goes_on = torch.ones_like(mask) if number == 1 else halted == 0
        ends = goes_on & (wants_to_halt(answer, model.hrm) | (number == model.hrm.n_supervision))
        halted = torch.where(ends, number, halted)
        at_halt = line if at_halt is None else torch.where(goes_on, line, at_halt)
        takes = goes_on if eval_halt == "q" else torch.ones_like(goes_on)
        predicted = said if number == 1 else torch.where(takes[:, None], said, predicted)
        q_halt = answer.q_halt if number == 1 else torch.where(takes, answer.q_halt, q_halt)
    assert at_halt is not None
    at_halt[3] = halted.double()
    return Solved(torch.stack([*lines, (at_halt * mask).sum(dim=-1)]), predicted, halted, q_halt)


def _lines(rows: PuzzleBatch, solved: Solved, *, writing: GridText, stride: int) -> list[dict[str, Any]]:
    lines = []
    for place, row in enumerate(rows.rows.tolist()):
        if row >= 0 and row % stride == 0:
            labels, predicted = rows.labels[place], solved.predicted[place].cpu().numpy()
            known = labels != IGNORE_INDEX
            line = {"row": row, "prompt": writing.write(rows.inputs[place])}
            line |= {"reference": writing.write(np.where(known, labels, -1)), "prediction": writing.write(predicted)}
            is_right = bool((predicted == labels)[known].all())
            lines.append({**line, "correct": is_right, "halted_after": int(solved.halts[place])})
    return lines


def described(sums: Tensor, eval_halt: str) -> dict[str, Any]:
    """Compute the figures of a measurement; those of `eval_halt` stand first, those of both ways below."""
    *segments, at_halt = sums.tolist()
    n = segments[0][3]
    figures = [_shares(line, n) for line in segments]
    halting = {**_shares(at_halt, n), "segments": at_halt[3] / max(n, 1)}
    chosen = halting if eval_halt == "q" else figures[-1]
    return {"n": int(n), **{name: chosen[name] for name in FIGURES}, "segments": figures, "halting_q": halting}


def _shares(line: list[float], n: float) -> dict[str, float]:
    of_puzzles = (value / max(n, 1) for value in line[:3])
    return dict(zip(FIGURES, (*of_puzzles, line[4] / max(line[5], 1)), strict=True))


class EvaluatePuzzles(EvaluateAtSteps):
    """Measures held-out puzzles."""

    def measure(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        trainer, hrm = self.trainer, self.cfg.hrm
        with random_numbers_kept(), trainer.heartbeat.within("evaluation"), trainer.averaged():
            return measure(
                trainer.model,
                self.rows,
                hrm=hrm,
                at_once=int(self.cfg.train.batch_size),
                limit=hrm.eval_limit,
                progress=lambda _: trainer.heartbeat.enter("evaluation"),
            )

    def summarize(self, figures: dict[str, Any]) -> tuple[dict[str, float], str]:
        selected = {name: figures[name] for name in FIGURES} | {"segments": figures["halting_q"]["segments"]}
        return selected, format_summary(figures)


class StopWhenLearned(Observer):
    """Ends the run, with a checkpoint and a last measurement, at the line of metrics whose training puzzles were right.

    Every rank sees the same figures, so that all stop together.
    """

    def __init__(self, share: float, evaluation: EvaluatePuzzles | None) -> None:
        self.share, self.evaluation = share, evaluation

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if not logs.get("count") or logs["exact_accuracy"] < self.share or control.should_training_stop:
            return
        log.say(f"{logs['exact_accuracy']:.1%} of the training puzzles were right: hrm.stop_at_exact ends the run")
        control.should_save = control.should_training_stop = True
        if self.evaluation is not None and not self.evaluation.measures_at(state.global_step, state):
            self.evaluation.evaluate(state.global_step)


def format_summary(figures: dict[str, Any]) -> str:
    curve = [segment["exact_accuracy"] for segment in figures["segments"]]
    shown = sorted({0, 1, 3, 7, len(curve) - 1} & set(range(len(curve))))
    after = "  ".join(f"{number + 1}: {curve[number]:.3f}" for number in shown)
    votes = f"pass@2 {figures['pass_at']['2']:.3f}  " if "pass_at" in figures else ""
    return (
        f"solved after segment {after}  {votes}blank cells {figures['blank_accuracy']:.3f}  "
        f"halts after {figures['halting_q']['segments']:.2f} (n {figures['n']})"
    )
