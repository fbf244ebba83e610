"""Runs on pairs that watch the loss of held-out pairs: when they end, and which weights they keep."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from in_process import assert_same_course, stop_and_resume, train
from pair_files import random_pairs, write_pairs
from small_run import Inputs

SETTINGS = {
    "train__batch_size": 4, "train__learning_rate": 0.01, "train__optim": "adamw_torch", "train__precision": "fp32",
    "train__eval_steps": 1, "train__save_steps": 1, "eval__limit": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def pairs(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """Longer answers are chosen in training, and shorter ones in what is held out: learning harms."""
    home = tmp_path_factory.mktemp("pairs")
    files = [
        write_pairs(home / f"{n}.jsonl", random_pairs(n, seed=n, longer=longer)) for n, longer in ((24, 1), (7, 0))
    ]
    return Inputs(tiny_llama, *files)


@pytest.mark.parametrize("task", ["dpo", "kto", "reward_model"])
def test_a_run_ends_when_held_out_pairs_lose_and_keeps_the_weights_that_were_best(
    task: str, pairs: Inputs, tmp_path: Path
):
    options = {**SETTINGS, "task_mode": task, "train__max_steps": 9, "eval__after": True}
    options |= {"train__early_stopping": 2, "train__best_metric": "loss"}
    run = train(tmp_path, pairs, **options)
    steps = range(1, run.outcome.step + 1)
    losses = [json.loads((run.folder.eval / f"step-{step}.json").read_text())["loss"] for step in steps]
    best = losses.index(min(losses))
    assert len(losses) < 9, "it ended early"
    assert len(losses) == best + 1 + 2
    after = json.loads((run.folder.eval / "after.json").read_text())
    assert after["loss"] == pytest.approx(losses[best], abs=1e-6)
    assert after["loss"] < losses[-1] - 1e-4


def test_patience_survives_a_stop(pairs: Inputs, tmp_path: Path):
    options = {
        **SETTINGS,
        "task_mode": "dpo",
        "tuning__mode": "full",
        "train__max_steps": 8,
        "train__early_stopping": 3,
    }
    whole = train(tmp_path / "whole", pairs, **options)
    resumed = stop_and_resume(tmp_path / "stopped", pairs, 2, **options)
    assert whole.outcome.step < 8
    assert_same_course(whole, resumed)
