"""Runs of task score through the real launcher: on two processes, and killed in each phase and continued."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from killed_worker import killed_in
from safetensors.torch import load_file
from score_run import score_options
from small_run import Inputs, write_small_run
from untimed_metrics import lines_of

Verb = Callable[..., CompletedProcess[str]]

pytestmark = pytest.mark.slow

KILLS = {
    "sampling": ("generation", 3, 1),
    "judging": ("reward", 3, 1),
    "the guide's step": ("backward", 4, 1),
    "the solver's step": ("backward", 4, 5),
    "saving": ("save", 4, 1),
}
"""Where the worker is killed: phase, step, and which time it enters the phase there. Every second step is saved. A step
has six backward passes: two micro-batches of hints, of first answers and of second ones."""


@pytest.mark.contract
def test_two_processes_sample_score_and_learn_as_one_does(inputs: Inputs, tmp_path: Path, sftplay: Verb):
    options = score_options(
        train__batch_size=4, train__learning_rate=1e-3, score__advantage="critic", score__steps_per_generation=2,
        score__episodes_per_problem=32,  # all of a rollout batch: the group lies on both ranks
    )  # fmt: skip
    config = write_small_run(tmp_path, inputs, **options)
    for processes in (1, 2):
        done = sftplay("train", "--config", config, f"run_name=run-{processes}", "--nproc", processes)
        assert done.returncode == 0, done.stderr
    one, two = (tmp_path / "outputs" / f"run-{processes}" for processes in (1, 2))
    for mine, its in zip(lines_of(two), lines_of(one), strict=True):
        for name in (
            "loss",
            "acc_t1",
            "acc_t2",
            "i2c",
            "c2i",
            "kl_t1",
            "kl_t2",
            "kl_guide",
            "value_loss",
            "advantage_t2_std",
            "ratio_t2",
        ):
            assert mine[name] == pytest.approx(its[name], abs=1e-6), name
        for name in ("critic_q1", "critic_q2", "critic_v1", "critic_v2"):  # squares of returns of up to 11
            assert mine[name] == pytest.approx(its[name], rel=1e-5), name
    for path in sorted((one / "adapter").rglob("*.safetensors")):
        its = load_file(two / path.relative_to(one))
        for name, tensor in load_file(path).items():
            assert (tensor - its[name]).abs().max() < 1e-6, name
    evaluated = [json.loads((each / "eval" / "step-4.json").read_text()) for each in (one, two)]
    assert evaluated[0]["acc_t2"] == pytest.approx(evaluated[1]["acc_t2"])
    assert evaluated[0]["n"] == evaluated[1]["n"] == 5


@pytest.mark.contract
@pytest.mark.long
def test_a_run_killed_in_each_phase_ends_as_if_nothing_had_been(inputs: Inputs, tmp_path: Path, sftplay: Verb):
    config = write_small_run(tmp_path, inputs, **score_options(train__max_steps=6, train__save_steps=2))
    assert sftplay("train", "--config", config, "run_name=whole").returncode == 0
    verb = "train"
    for phase, step, time in KILLS.values():
        done = sftplay(verb, "--config", config, "run_name=killed", env=killed_in(tmp_path, phase, step, time=time))
        assert done.returncode == 5, done.stderr
        verb = "resume"
    done = sftplay("resume", "--config", config, "run_name=killed")
    assert done.returncode == 0, done.stderr
    whole, killed = tmp_path / "outputs" / "whole", tmp_path / "outputs" / "killed"
    assert lines_of(killed) == lines_of(whole)
    for path in sorted((whole / "adapter").rglob("*.safetensors")):
        assert (killed / path.relative_to(whole)).read_bytes() == path.read_bytes()
