"""The shipped run on 4x4 Sudoku: it solves puzzles whose solutions it never saw, and the repetition is what does it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

CONFIG = Path(__file__).resolve().parents[3] / "configs" / "run_hrm_sudoku4.yaml"
Verb = Callable[..., CompletedProcess[str]]


def last_measurement(sftplay: Verb, home: Path, *changes: str) -> dict[str, Any]:
    given = (f"output_dir={home}", "run_name=run", "train.eval_steps=600", "logging.backend=none")
    done = sftplay("train", "--config", CONFIG, *given, *changes)
    assert done.returncode == 0, done.stderr
    last_line = json.loads((home / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    measured = json.loads((home / "run" / "eval" / "step-600.json").read_text())
    return {**measured, "segments_in_training": last_line["steps"]}


def expect_the_specified_figures(measured: dict[str, Any]) -> None:
    curve = [each["exact_accuracy"] for each in measured["segments"]]
    assert measured["n"] == 264
    assert curve[3] >= 0.7
    assert curve[3] - curve[0] >= 0.15
    assert measured["halting_q"]["segments"] < 3
    assert measured["segments_in_training"] < 3
    assert measured["q_halt_accuracy"] >= 0.8


@pytest.mark.slow
def test_600_steps_solve_unseen_puzzles_and_later_segments_solve_more(sftplay: Verb, tmp_path: Path):
    expect_the_specified_figures(last_measurement(sftplay, tmp_path))


@pytest.mark.long
def test_another_seed_does_as_well_and_a_single_segment_does_worse(sftplay: Verb, tmp_path: Path):
    other = last_measurement(sftplay, tmp_path / "other", "seed=2")
    expect_the_specified_figures(other)
    single = last_measurement(sftplay, tmp_path / "single", "seed=2", "hrm.n_supervision=1")
    assert single["exact_accuracy"] < other["exact_accuracy"] - 0.05
