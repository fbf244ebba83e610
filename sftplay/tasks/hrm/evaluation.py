"""Held-out puzzles measured while a run trains: how many are right after each segment, and where the model would halt.

Every rank measures its share; rows of padding count for nothing.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from sftplay import log
from sftplay.atomic import write_text
from sftplay.config.run import RunConfig
from sftplay.data.puzzles.folder import PuzzleFolder
from sftplay.model.out_of_memory import gather_objects
from sftplay.tasks.hrm.measuring import FIGURES, Measured, measure
from sftplay.train.observer import Observer
from sftplay.train.random_numbers import random_numbers_kept


class EvaluatePuzzles(Observer):
    """Writes eval/step-N.json, and hands the figures to the next line of metrics.

    What lies there already is kept: after a resume nothing is measured twice.
    """

    trainer: Any

    def __init__(self, cfg: RunConfig, puzzles: PuzzleFolder, *, folder: Path, every: int) -> None:
        """`folder` is the run's eval/; `every` the steps between two evaluations."""
        self.cfg, self.puzzles, self.folder, self.every = cfg, puzzles, folder, every

    def measures_at(self, step: int, state: Any) -> bool:
        return step > 0 and (step % self.every == 0 or step == state.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.measures_at(state.global_step, state):
            control.should_log = True  # a line for the figures
            self.evaluate(state.global_step)

    def evaluate(self, step: int) -> None:
        """Measure all puzzles, once a step. All ranks call it."""
        path, trainer = self.folder / f"step-{step}.json", self.trainer
        if gather_objects(path.exists())[0]:
            return
        began = time.monotonic()
        with random_numbers_kept(), trainer.heartbeat.within("evaluation"), trainer.averaged():
            figures, lines = measure(
                trainer.model,
                self.puzzles,
                hrm=self.cfg.hrm,
                at_once=int(self.cfg.train.batch_size),
                limit=self.cfg.hrm.eval_limit,
                progress=lambda _: trainer.heartbeat.enter("evaluation"),
            )
        figures = {"step": step, **figures, "seconds": round(time.monotonic() - began, 3)}
        if log.is_main():
            write_measured(path, Measured(figures, lines))
        trainer.held_out_figures = {f"eval_{name}": figures[name] for name in FIGURES}
        trainer.held_out_figures["eval_segments"] = figures["halting_q"]["segments"]
        log.say(f"step {step}/{trainer.state.max_steps}  {format_summary(figures)}", "eval")


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
        if self.evaluation is not None:
            self.evaluation.evaluate(state.global_step)


def write_measured(path: Path, measured: Measured) -> None:
    """Write the figures, and the answers for people beside them."""
    write_text(
        path.with_suffix(".jsonl"), "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in measured.lines)
    )
    write_text(path, json.dumps(measured.figures, indent=1) + "\n")


def format_summary(figures: dict[str, Any]) -> str:
    """The figures in a line."""
    curve = [each["exact_accuracy"] for each in figures["segments"]]
    shown = sorted({0, 1, 3, 7, len(curve) - 1} & set(range(len(curve))))
    after = "  ".join(f"{number + 1}: {curve[number]:.3f}" for number in shown)
    votes = f"pass@2 {figures['pass_at']['2']:.3f}  " if "pass_at" in figures else ""
    return (
        f"solved after segment {after}  {votes}blank cells {figures['blank_accuracy']:.3f}  "
        f"halts after {figures['halting_q']['segments']:.2f} (n {figures['n']})"
    )
