"""The negative control: a solver that repeats its first answer learns to do so even better, and no run calls that
self-correction (toy A of BiLevel SCoRe's specification)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from in_process import train
from score_run import score_inputs, score_options
from small_run import Inputs

from sftplay.model.builtin import RECIPES
from sftplay.model.toys import DigitsRecipe

pytestmark = pytest.mark.slow

STEPS = 20
OPTIONS: dict[str, Any] = {
    "tuning__lora__r": 32,
    "train__learning_rate": 1e-3,
    "train__lr_scheduler": "constant",
    "train__effective_batch_size": 64,
    "train__batch_size": 64,
    "train__max_steps": STEPS,
    "train__eval_steps": STEPS,
    "score__stage1_steps": STEPS,
    "score__stage2_steps": 0,
    "score__beta2": 3.0,
    "score__beta_guide": 0.01,
    "score__guide_learning_rate": 1e-3,
    "score__eval_temperature": 1.0,
    "score__eval_samples": 20,
    "eval__limit": None,
    "eval__before": False,
    "eval__after": False,
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    recipe = RECIPES["copier"]
    assert isinstance(recipe, DigitsRecipe)
    return score_inputs(tmp_path_factory.mktemp("copier"), recipe=recipe)


def test_copying_is_called_copying_and_no_self_correction(inputs: Inputs, tmp_path: Path):
    run = train(tmp_path, inputs, **score_options(**OPTIONS))
    start, end = (json.loads((run.folder.eval / f"step-{step}.json").read_text()) for step in (0, STEPS))
    assert end["diagnosis"] == "turn 2 copies the first answer: no self-correction"
    # The rest of the table: second answers get as right as first ones, and are the same.
    assert end["delta"] > start["delta"]
    assert abs(end["delta"]) < 0.05
    assert end["repeats"] > max(0.9, start["repeats"])
    assert end["i2c"] < 0.05
    assert abs(end["acc_t1"] - start["acc_t1"]) < 0.05
