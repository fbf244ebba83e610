"""Held-out puzzles measured while a run trains: how many are right after each segment, and where the model would halt.

Every rank measures its share; rows of padding count for nothing.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sftplay import log
from sftplay.atomic import write_text
from sftplay.config.schema.run import RunConfig
from sftplay.data.puzzles.folder import PuzzleFolder
from sftplay.data.puzzles.sampler import TestRows
from sftplay.data.records import IGNORE_INDEX
from sftplay.monitor.metrics import gather_objects
from sftplay.monitor.observer import Observer
from sftplay.tasks.hrm.act import Puzzles
from sftplay.tasks.hrm.network.model import PuzzleModel
from sftplay.tasks.hrm.solve import first_halts, refined
from sftplay.tasks.hrm.trainer import as_puzzles
from sftplay.tasks.step.random_numbers import random_numbers_kept


class EvaluatePuzzles(Observer):
    """Writes eval/step-N.json, and hands the figures to the next line of metrics.

    What lies there already is kept: after a resume nothing is measured twice.
    """

    trainer: Any

    def __init__(self, cfg: RunConfig, puzzles: PuzzleFolder, *, folder: Path, every: int) -> None:
        """`folder` is the run's eval/; `every` the steps between two evaluations."""
        self.cfg, self.puzzles, self.folder, self.every = cfg, puzzles, folder, every

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.every == 0 or state.global_step == state.max_steps:
            control.should_log = True  # a line for the figures
            self.evaluate(state.global_step)

    def evaluate(self, step: int) -> None:
        """Measure all puzzles, once a step. All ranks call it."""
        path, trainer = self.folder / f"step-{step}.json", self.trainer
        if gather_objects(path.exists())[0]:
            return
        began = time.monotonic()
        with random_numbers_kept(), trainer.heartbeat.within("evaluation"), trainer.averaged():
            sums = self._measure()
        figures: dict[str, Any] = {"step": step, **described(sums, self.cfg.hrm.eval_halt)}
        figures["seconds"] = round(time.monotonic() - began, 3)
        if log.is_main():
            write_text(path, json.dumps(figures, indent=1) + "\n")
        names = ("exact_accuracy", "accuracy", "q_halt_accuracy")
        trainer.held_out_figures = {f"eval_{name}": figures[name] for name in names}
        trainer.held_out_figures["eval_segments"] = figures["halting_q"]["segments"]
        log.say(f"step {step}/{trainer.state.max_steps}  {said_of(figures)}", "eval")

    def _measure(self) -> Tensor:
        """What `segment_sums` gives, over the rows of all ranks."""
        trainer, model = self.trainer, self.trainer.model
        device = trainer.args.device
        batch = self.cfg.train.effective_batch_size
        sums = torch.zeros(model.hrm.n_supervision + 1, 4, dtype=torch.float64, device=device)
        model.eval()
        measured = 0
        for rows in TestRows(self.puzzles, global_batch=batch, rank=log.rank(), world=log.world_size()):
            if self.cfg.hrm.eval_limit is not None and measured >= self.cfg.hrm.eval_limit:
                break
            measured += batch
            mask = torch.from_numpy(rows.mask).to(device)
            sums += segment_sums(model, as_puzzles(rows, device), mask=mask)
            trainer.heartbeat.enter("evaluation")
        model.train()
        if log.world_size() > 1:
            torch.distributed.all_reduce(sums)
        return sums


def segment_sums(model: PuzzleModel, puzzles: Puzzles, *, mask: Tensor) -> Tensor:
    """fp64 [n_supervision + 1, 4]: sums over the rows that `mask` keeps, after each segment and, last, where each row
    halts: right puzzles, shares of right cells, right judgements of q_halt; rows, and in the last line segments.
    """
    inputs, labels, identifiers = puzzles
    known = labels != IGNORE_INDEX
    answers, lines = [], []
    for answer in refined(model, inputs, identifiers=identifiers):
        right = ((answer.logits.argmax(dim=-1) == labels) & known).sum(dim=-1)
        whole = right == known.sum(dim=-1)
        share = right / known.sum(dim=-1).clamp(min=1)
        judged = (answer.q_halt >= 0) == whole
        lines.append(torch.stack([whole.double(), share.double(), judged.double(), torch.ones_like(share).double()]))
        answers.append(answer._replace(logits=answer.logits[:0]))
    halts = first_halts(model, answers)
    by_segment = torch.stack(lines)
    at_halt = by_segment.gather(0, halts.expand(1, 4, -1))
    at_halt[0, 3] = halts + 1.0
    return (torch.cat((by_segment, at_halt)) * mask).sum(dim=-1)


def described(sums: Tensor, eval_halt: str) -> dict[str, Any]:
    """The figures of a measurement; those of `eval_halt` stand first, those of both ways below."""
    *segments, at_halt = sums.tolist()
    n = segments[0][3]
    figures = [_shares(line, n) for line in segments]
    halting = {**_shares(at_halt, n), "segments": at_halt[3] / max(n, 1)}
    chosen = halting if eval_halt == "q" else figures[-1]
    names = ("exact_accuracy", "accuracy", "q_halt_accuracy")
    return {"n": int(n), **{name: chosen[name] for name in names}, "segments": figures, "halting_q": halting}


def _shares(line: list[float], n: float) -> dict[str, float]:
    exact, cells, judged = (value / max(n, 1) for value in line[:3])
    return {"exact_accuracy": exact, "accuracy": cells, "q_halt_accuracy": judged}


def said_of(figures: dict[str, Any]) -> str:
    """The figures in a line."""
    curve = [each["exact_accuracy"] for each in figures["segments"]]
    shown = sorted({0, 1, 3, 7, len(curve) - 1} & set(range(len(curve))))
    after = "  ".join(f"{number + 1}: {curve[number]:.3f}" for number in shown)
    return (
        f"solved after segment {after}  cells {figures['accuracy']:.3f}  "
        f"halts after {figures['halting_q']['segments']:.2f} (n {figures['n']})"
    )
