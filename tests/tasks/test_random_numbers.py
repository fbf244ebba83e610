"""Measuring and saving leave no trace in what a run learns."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from in_process import Inputs, train
from safetensors.torch import load_file

from sftplay.train.eval_mode import random_numbers_kept


def draw() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def test_what_a_block_draws_changes_no_number_after_it_even_when_it_fails():
    with random_numbers_kept():
        expected = draw()
    with random_numbers_kept():
        with suppress(ValueError), random_numbers_kept():
            draw()
            raise ValueError
        assert draw() == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_a_block_draws_on_the_gpu_changes_no_number_after_it():
    torch.rand((), device="cuda")
    with random_numbers_kept():
        expected = float(torch.rand((), device="cuda"))
    assert float(torch.rand((), device="cuda")) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"tuning__mode": "lora", "tuning__lora__dropout": 0.2},
        {"tuning__mode": "full", "train__neftune_alpha": 5, "train__dataloader_num_workers": 1},
    ],
)
def test_a_run_ends_in_the_same_weights_however_often_it_is_measured_and_saved(
    options: dict[str, Any], inputs: Inputs, tmp_path: Path
):
    options |= {"train__max_steps": 6, "train__batch_size": 4}
    ends = []
    for name, every, before in (("often", 2, True), ("never", 1000, False)):
        steps = {"train__save_steps": every, "train__eval_steps": every, "eval__before": before}
        run = train(tmp_path / name, inputs, **steps, **options)
        assert run.folder.result is not None
        (path,) = run.folder.result.glob("*.safetensors")
        ends.append(load_file(path))
        assert len(list(run.folder.eval.glob("step-*.json"))) == (
            3 if every == 2 else 1
        )  # the last step is always measured
    often, never = ends
    assert all(torch.equal(value, never[name]) for name, value in often.items())
