"""A rate that was found with another effective batch is scaled once, and that is said."""

from __future__ import annotations

import pytest

from sftplay.machine.probe import Machine
from sftplay.plan.sizing import size_run

FOUND = "train: {learning_rate: 0.001, effective_batch_size: 64, lr_batch_size: 16, lr_scaling: SCALING}\n"


def sized(cfg, processes=1):
    machine = Machine((), "none in this test", 2**34, 2, "3.11", "Linux", {})
    return size_run(cfg, machine, world_size=processes)


# 64 rows are 4 times 16: Goyal et al. take 4 times the rate, Malladi et al. for Adam twice the rate.
@pytest.mark.parametrize(("scaling", "rate"), [("linear", 0.004), ("sqrt", 0.002)])
def test_rate_grows_with_the_batch_or_with_its_root_and_is_said(load, scaling, rate):
    run = sized(load(FOUND.replace("SCALING", scaling)))
    assert run.cfg.train.peak_rate == pytest.approx(rate)
    assert run.as_plan()["learning_rate"] == pytest.approx(rate)
    said = f"0.001 found with 16 rows a step, 64 here: train.lr_scaling {scaling} trains with a peak rate of {rate}"
    assert [note for note in run.notes if "rate" in note] == [f"train.learning_rate {said}"]


def test_nothing_is_scaled_by_default_and_more_processes_scale_nothing(load):
    cfg = load("train: {learning_rate: 0.001, effective_batch_size: 64}\n")
    assert sized(cfg).cfg.train.peak_rate == sized(cfg, 4).cfg.train.peak_rate == 0.001
    assert not any("rate" in note for note in sized(cfg).notes)
    scaled = load(FOUND.replace("SCALING", "linear"))
    assert sized(scaled).cfg.train.peak_rate == sized(scaled, 4).cfg.train.peak_rate
