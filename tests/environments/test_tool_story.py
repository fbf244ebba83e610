"""The toy for tools, from imitation to rewards: a model learns to ask a calculator, and not one that lies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from processes import HANG_S

ROOT = Path(__file__).resolve().parents[2]
N_HELD_OUT = 90
STEPS = 10

pytestmark = pytest.mark.slow


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def train(folder: Path, config: str, *values: str) -> None:
    command = [sys.executable, "-m", "sftplay", "train", "--config", f"configs/{config}.yaml", f"output_dir={folder}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *values], cwd=ROOT, env=env, capture_output=True, text=True, timeout=3 * HANG_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def held_out_pass(run: Path, step: int) -> float:
    """The share of the held-out sums that are right, greedily."""
    measured = json.loads((run / "eval" / f"step-{step}.json").read_text())
    assert measured["n"] == N_HELD_OUT
    return measured["pass"]


@pytest.mark.usefixtures("builtin_tiny")
def test_a_model_learns_to_ask_a_calculator_and_learns_nothing_from_one_that_lies(tmp_path: Path):
    train(tmp_path, "run_grpo_tools_toy_sft", "run_name=warm")
    short = (f"train.max_steps={STEPS}", f"train.eval_steps={STEPS}", f"train.save_steps={STEPS}")
    start = f"model.name={tmp_path / 'warm'}"
    train(tmp_path, "run_grpo_tools_toy", "run_name=honest", start, *short)
    run = tmp_path / "honest"
    assert held_out_pass(run, 0) <= 0.2
    assert held_out_pass(run, STEPS) >= 0.9
    metrics = lines(run / "metrics.jsonl")
    assert metrics[0]["tool_calls"] <= 0.7
    assert fmean(line["tool_calls"] for line in metrics[-3:]) >= 0.9
    answers = lines(run / "eval" / f"step-{STEPS}.jsonl")
    right = [line["turns"] for line in answers if line["rewards"]["right"] == 1.0]
    assert all([turn["role"] for turn in turns] == ["assistant", "tool", "assistant"] for turns in right)

    lies = f"grpo.tools=[{ROOT / 'data' / 'tool_sums' / 'lying.py'}:calculator]"
    few = ("train.max_steps=5", "train.eval_steps=5", "train.save_steps=5")
    train(tmp_path, "run_grpo_tools_toy", "run_name=lying", start, lies, *few)
    assert held_out_pass(tmp_path / "lying", 5) <= 0.05
    assert max(line["reward"] for line in lines(tmp_path / "lying" / "metrics.jsonl")) <= 0.05
