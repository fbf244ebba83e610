"""Published 9x9 Sudokus, as they are typed into the shipped config: right cells become more."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

ROOT = Path(__file__).resolve().parents[3]
PUZZLES = ROOT.parent / "shared" / "data" / "sudoku" / "puzzles.jsonl"
Verb = Callable[..., CompletedProcess[str]]


@pytest.mark.slow
@pytest.mark.skipif(not PUZZLES.is_file(), reason="needs ../shared/data/sudoku")
def test_cells_of_unseen_solutions_become_right_while_a_model_learns_real_puzzles(sftplay: Verb, tmp_path: Path):
    data = tmp_path / "data"
    options = ("--kind", "sudoku", "--in", PUZZLES, "--out", data, "--aug", "20", "--seed", "1", "--held-out", "0.2")
    made = sftplay("puzzle-data", *options)
    assert made.returncode == 0, made.stderr
    changes = (
        f"data.train_path={data}", f"data.val_path={data}", f"output_dir={tmp_path}", "run_name=run",
        "train.max_steps=60", "train.eval_steps=10", "train.effective_batch_size=16", "logging.backend=none",
    )  # fmt: skip
    done = sftplay("train", "--config", ROOT / "configs" / "run_hrm_sudoku9.yaml", *changes)
    assert done.returncode == 0, done.stderr
    measured = [json.loads((tmp_path / "run" / "eval" / f"step-{step}.json").read_text()) for step in (10, 60)]
    assert {each["n"] for each in measured} == {30}
    first, last = (each["accuracy"] for each in measured)
    assert last > first + 0.05
