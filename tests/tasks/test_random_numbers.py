"""Measuring and saving leave no trace in what a run learns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from in_process import Inputs, train

from sftplay.train.eval_mode import random_numbers_kept


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_a_block_draws_on_the_gpu_changes_no_number_after_it():
    torch.rand((), device="cuda")
    with random_numbers_kept():
        expected = float(torch.rand((), device="cuda"))
    assert float(torch.rand((), device="cuda")) == expected


def test_a_run_ends_in_the_same_weights_however_often_it_is_measured_and_saved(inputs: Inputs, tmp_path: Path):
    options = {"tuning__lora__dropout": 0.2, "train__neftune_alpha": 5, "train__dataloader_num_workers": 1}
    options |= {"train__max_steps": 6, "train__batch_size": 4}
    ends = []
    for name, every, before in (("often", 2, True), ("never", 1000, False)):
        steps = {"train__save_steps": every, "train__eval_steps": every, "eval__before": before}
        run = train(tmp_path / name, inputs, **steps, **options)
        ends.append(run.weights)
        assert len(list(run.folder.eval.glob("step-*.json"))) == (
            3 if every == 2 else 1
        )  # the last step is always measured
    often, never = ends
    assert all(torch.equal(value, never[name]) for name, value in often.items())
