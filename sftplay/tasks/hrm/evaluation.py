"""Held-out puzzles measured while a run trains: how many are right after each segment, and where the model would halt.

Every rank measures its share; rows of padding count for nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sftplay import log
from sftplay.atomic import write_text
from sftplay.config.run import RunConfig
from sftplay.model.out_of_memory import gather_objects
from sftplay.tasks.hrm.measuring import FIGURES, measure
from sftplay.train.observer import Observer
from sftplay.train.random_numbers import random_numbers_kept


def write_measured(path: Path, figures: Mapping[str, Any], *, lines: Iterable[Mapping[str, Any]]) -> None:
    """Write the figures, and the answers for people next to them (.jsonl); the folder may be missing."""
    write_lines(path.with_suffix(".jsonl"), lines)
    write_text(path, json.dumps(figures, indent=1) + "\n")


def write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Write the lines as JSON Lines; the folder may be missing."""
    path.parent.mkdir(exist_ok=True)
    write_text(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


class EvaluateAtSteps(Observer):
    """Measures held-out rows while a run trains; writes eval/step-N.json and .jsonl.

    The figures go to the next line of metrics. Existing files are read: after a resume nothing is measured twice.
    """

    trainer: Any

    def __init__(self, cfg: RunConfig, rows: Any, *, folder: Path, every: int, extra_step: int = 0) -> None:
        """`rows` are held out; `folder` is the run's eval/; `every` is the steps between two evaluations.

        It measures at `extra_step` too.
        """
        self.cfg, self.rows, self.folder, self.every, self.extra_step = cfg, rows, folder, every, extra_step

    def measure(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return figures, and on the main rank answers for people."""
        raise NotImplementedError

    def summarize(self, figures: dict[str, Any]) -> tuple[dict[str, float], str]:
        """Return the figures for a line of metrics by their names, and all in a line for people."""
        raise NotImplementedError

    def measures_at(self, step: int, state: Any) -> bool:
        return step > 0 and (step % self.every == 0 or step in (self.extra_step, state.max_steps))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.measures_at(state.global_step, state):
            control.should_log = True  # a line for the figures
            self.evaluate(state.global_step)

    def evaluate(self, step: int) -> dict[str, Any]:
        """Return the figures of a step, measured or read from the step's file. All ranks call it."""
        path, trainer = self.folder / f"step-{step}.json", self.trainer
        kept = path.read_text(encoding="utf-8") if log.is_main() and path.exists() else None
        if known := gather_objects(kept)[0]:
            figures = json.loads(known)
        else:
            began = time.monotonic()
            found, lines = self.measure()
            figures = {"step": step, **found, "seconds": round(time.monotonic() - began, 3)}
            if log.is_main():
                write_measured(path, figures, lines=lines)
        selected, summary = self.summarize(figures)
        logged = {f"eval_{name}": value for name, value in selected.items()}
        if step:
            trainer.held_out_figures = logged
        else:  # the first line of metrics comes at step 1, but a tracker's curve starts here
            trainer.log(logged)
        log.say(f"step {step}/{trainer.state.max_steps}  {summary}", "eval")
        return figures


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
    """Format the figures as one line."""
    curve = [segment["exact_accuracy"] for segment in figures["segments"]]
    shown = sorted({0, 1, 3, 7, len(curve) - 1} & set(range(len(curve))))
    after = "  ".join(f"{number + 1}: {curve[number]:.3f}" for number in shown)
    votes = f"pass@2 {figures['pass_at']['2']:.3f}  " if "pass_at" in figures else ""
    return (
        f"solved after segment {after}  {votes}blank cells {figures['blank_accuracy']:.3f}  "
        f"halts after {figures['halting_q']['segments']:.2f} (n {figures['n']})"
    )
