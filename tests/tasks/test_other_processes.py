"""A run continues on another number of processes with the same rows, effective batch and curve."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from run_outputs import Outputs

from sftplay.config.load import load_config
from sftplay.launch.command import Scale
from sftplay.runs.resume import free_sizes
from sftplay.train.checkpointing import config_changes

STEPS, SAVE_STEPS, STEP_ROWS = 12, 4, 8


@pytest.mark.parametrize(
    ("given", "processes", "left"),
    [
        (("auto", "auto"), 2, ("auto", "auto")),
        ((2, 2), 1, (2, "auto")),
        ((4, 2), 4, ("auto", "auto")),
        ((2, 4), 2, (2, "auto")),
        (("auto", 4), 4, ("auto", "auto")),
        (("auto", 4), 2, ("auto", 4)),
        ((4, "auto"), 2, (4, "auto")),
    ],
)
def test_sizes_given_for_another_number_of_processes_are_left_open_where_they_are_not_exact(
    write_config: Callable[..., Path], given: tuple[Any, Any], processes: int, left: tuple[Any, Any]
):
    """By hand, for eight rows a step: a process's share is eight by their number."""
    cfg = load_config(write_config(train__batch_size=given[0], train__grad_accum=given[1]))
    train = free_sizes(cfg, Scale(processes)).train
    assert (train.batch_size, train.grad_accum) == left


def test_worker_takes_another_number_of_processes_only_when_the_verb_has_said_so():
    before, now = ({"config": {"seed": 1}, "world_size": n} for n in (2, 1))
    assert config_changes(before, now) == ["it ran on 2 processes and runs on 1 now"]
    assert config_changes(before, now, resized=True) == []


OF_TWO = ["train.batch_size=2", "train.grad_accum=2"]
"""Sizes that are exact on two processes only, in every command of a run that began there."""


@pytest.mark.slow
def test_run_moves_from_two_processes_to_one_and_back_on_the_same_curve(
    write_config: Callable[..., Path], sftplay: Callable[..., CompletedProcess[str]], tmp_path: Path
):
    config = write_config(
        model__max_seq_len=64, tuning__lora__dropout=0.0, train__max_steps=STEPS, train__save_steps=SAVE_STEPS,
        train__effective_batch_size=STEP_ROWS, train__save_total_limit=9, data__val_path=None, data__split=0,
    )  # fmt: skip
    shop = Outputs(tmp_path)

    def run(verb: str, name: str, processes: int) -> str:
        done = sftplay(verb, "--config", config, f"run_name={name}", "--nproc", processes, *OF_TWO)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("train", "whole", 2)
    name = "moved"
    shutil.copytree(shop.folder("whole").path, shop.folder(name).path)
    for at, before, now in ((4, 2, 1), (8, 1, 2)):
        shop.cut_off(name, at)
        output = run("resume", name, now)
        assert f"began on {before} process(es) and continues on {now}, each with" in output
        assert "draw other numbers" not in output
        plan = shop.folder(name).read_json("plan.json")
        assert shop.folder(name).is_resized
        assert (plan["world_size"], plan["effective_batch_size"]) == (now, STEP_ROWS)
        assert plan["batch_size"] * plan["grad_accum"] * now == STEP_ROWS
    ours, whole = shop.metrics(name), shop.metrics("whole")
    assert [len(line["row_ids"]) for line in ours] == [2] * 4 + [1] * 4 + [2] * 4
    for moved, other in zip(ours, whole, strict=True):
        assert (moved["step"], moved["learning_rate"]) == (other["step"], other["learning_rate"])
        assert moved["loss"] == pytest.approx(other["loss"], abs=1e-5)
        rows, others = ([row for rank in line["row_ids"] for row in rank] for line in (moved, other))
        assert rows == others
    ends = zip(shop.weights(name).values(), shop.weights("whole").values(), strict=True)
    assert max(float((one - two).abs().max()) for one, two in ends) < 1e-4
