"""Runs of task hrm through the real launcher: two processes learn as one does, and a killed run ends as a whole one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch
from hrm_run import write_hrm_run, write_puzzles
from killed_worker import killed_in
from safetensors.torch import load_file
from untimed_metrics import lines_of

Verb = Callable[..., CompletedProcess[str]]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def puzzles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_puzzles(tmp_path_factory.mktemp("puzzles"))


def checkpoint_tensors(folder: Path, step: int) -> dict[str, torch.Tensor]:
    found = {}
    for path in sorted((folder / "checkpoints" / f"checkpoint-{step}").glob("*.safetensors")):
        found |= {f"{path.name}/{name}": tensor for name, tensor in load_file(path).items()}
    return found


@pytest.fixture(scope="module")
def two(puzzles: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A home, and the YAML in it of a run that takes two processes."""
    home = tmp_path_factory.mktemp("two")
    return home, write_hrm_run(home, puzzles, hrm__ema=0.9)


def test_two_processes_learn_as_one_does(two: tuple[Path, Path], sftplay: Verb):
    home, config = two
    for processes in (1, 2):
        done = sftplay("train", "--config", config, f"run_name=run-{processes}", "--nproc", processes)
        assert done.returncode == 0, done.stderr
    one, other = (home / "outputs" / f"run-{processes}" for processes in (1, 2))
    for mine, its in zip(lines_of(other), lines_of(one), strict=True):
        assert mine["row_ids"][0] + mine["row_ids"][1] == its["row_ids"][0]
        for name in ("loss", "lm_loss", "q_halt_loss", "q_continue_loss", "accuracy", "count", "steps", "rows_touched"):
            assert mine[name] == pytest.approx(its[name], abs=1e-6), name
    weights = load_file(other / "model" / "model.safetensors")
    for name, tensor in load_file(one / "model" / "model.safetensors").items():
        if name == "puzzles.rows":
            assert torch.equal(weights[name], tensor)
        else:
            assert (weights[name] - tensor).abs().max() < 1e-5, name
    last = [json.loads((each / "eval" / "step-8.json").read_text()) for each in (one, other)]
    assert last[0]["segments"] == last[1]["segments"]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_killed_run_ends_as_a_whole_one_bit_for_bit(processes: int, puzzles: Path, tmp_path: Path, sftplay: Verb):
    config = write_hrm_run(tmp_path, puzzles, hrm__ema=0.9, train__save_steps=2)
    given = ("--config", config, "--nproc", processes)
    assert sftplay("train", *given, "run_name=whole").returncode == 0
    verb = "train"
    for phase, step in (("backward", 4), ("save", 6)):
        env = killed_in(tmp_path, phase, step, rank=processes - 1)
        done = sftplay(verb, *given, "run_name=killed", env=env)
        assert done.returncode == 5, done.stderr
        verb = "resume"
    done = sftplay("resume", *given, "run_name=killed")
    assert done.returncode == 0, done.stderr
    whole, killed = tmp_path / "outputs" / "whole", tmp_path / "outputs" / "killed"
    assert lines_of(killed) == lines_of(whole)
    its = checkpoint_tensors(whole, 8)
    assert {name.partition("/")[0] for name in its} >= {f"carry-{rank}.safetensors" for rank in range(processes)}
    again = checkpoint_tensors(killed, 8)
    assert again.keys() == its.keys()
    for name, tensor in again.items():
        assert torch.equal(tensor, its[name]), name
