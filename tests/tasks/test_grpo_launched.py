"""GRPO runs through the real launcher: killed in each phase and continued, and on two processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from grpo_run import grpo_inputs, grpo_options
from killed_worker import killed_in
from small_run import write_small_run
from untimed_metrics import lines_of

Verb = Callable[..., CompletedProcess[str]]

pytestmark = pytest.mark.slow

KILLS = {"generation": 5, "reward": 5, "backward": 7}
"""Phase -> the step in which the worker is killed there. Four steps learn from one drawing, and every second one is
saved: the last kill is answered from a checkpoint inside a drawing."""


def samples_of(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted((folder / "samples").glob("*.jsonl"))}


@pytest.mark.contract
def test_a_run_killed_while_it_draws_judges_and_learns_ends_as_if_nothing_had_been(
    tiny_llama: Path, tmp_path: Path, sftplay: Verb
):
    inputs = grpo_inputs(tiny_llama, tmp_path / "prompts")
    window = {"grpo__num_iterations": 2, "grpo__steps_per_generation": 2, "train__batch_size": 4}
    options = grpo_options(inputs, train__max_steps=9, train__save_steps=2, **window)
    config = write_small_run(tmp_path, inputs, **options)
    assert sftplay("train", "--config", config, "run_name=whole").returncode == 0
    verb = "train"
    for phase, step in KILLS.items():
        done = sftplay(verb, "--config", config, "run_name=killed", env=killed_in(tmp_path, phase, step))
        assert done.returncode == 5, done.stderr
        assert "SIGKILL" in done.stdout + done.stderr
        verb = "resume"
    done = sftplay("resume", "--config", config, "run_name=killed")
    assert done.returncode == 0, done.stderr
    assert "checkpoint-6" in done.stdout + done.stderr
    whole, killed = tmp_path / "outputs" / "whole", tmp_path / "outputs" / "killed"
    assert lines_of(killed) == lines_of(whole)
    assert list(samples_of(whole)) == ["step-1.jsonl", "step-5.jsonl", "step-9.jsonl"]
    assert samples_of(killed) == samples_of(whole)
    for file in ("model/model.safetensors",):
        assert (killed / file).read_bytes() == (whole / file).read_bytes()


@pytest.mark.contract
def test_two_processes_draw_for_the_same_prompts_and_judge_whole_groups(
    tiny_llama: Path, tmp_path: Path, sftplay: Verb
):
    inputs = grpo_inputs(tiny_llama, tmp_path / "prompts")
    options = grpo_options(inputs, train__max_steps=4, train__batch_size=2)
    config = write_small_run(tmp_path, inputs, **options)
    for processes in (1, 2):
        done = sftplay("train", "--config", config, f"run_name=run-{processes}", "--nproc", processes)
        assert done.returncode == 0, done.stderr
    one, two = (tmp_path / "outputs" / f"run-{processes}" for processes in (1, 2))
    drawn = [
        {name: [json.loads(line) for line in text.splitlines()] for name, text in samples_of(each).items()}
        for each in (one, two)
    ]
    assert [[line["prompt_id"] for line in lines] for lines in drawn[1].values()] == [
        [line["prompt_id"] for line in lines] for lines in drawn[0].values()
    ]
    for lines in drawn[1].values():
        assert len({line["completion"] for line in lines[:4]}) > 1  # each rank has random numbers of its own
        for at in (0, 4):
            assert sum(line["advantage"] for line in lines[at : at + 4]) == pytest.approx(0.0, abs=1e-5)
    for each in (one, two):
        for line, paid in zip(lines_of(each), samples_of(each).values(), strict=True):
            rewards = [json.loads(row)["rewards"]["variety"] for row in paid.splitlines()]
            assert line["reward"] == pytest.approx(sum(rewards) / len(rewards))
            assert sorted(row for rank in line["row_ids"] for row in rank) == sorted(
                json.loads(row)["prompt_id"] for row in paid.splitlines()
            )
    ranks = json.loads((two / "status.json").read_text())["ranks"]
    assert {rank["model_class"] for rank in ranks} == {"DistributedDataParallel"}
