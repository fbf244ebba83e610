"""From imitation to rewards on the toy, through the real sandbox: what is learned, and what must not be."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from in_process import Inputs, train
from processes import HANG_S
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[3]
PARTS = ("sftplay", "workflows", "configs", "Makefile", "data/base", "data/mistaken_words")

pytestmark = pytest.mark.slow

STEPS = 40
"""Enough for the likeliest answers; those that are sampled become surer until step 60."""

N_HELD_OUT = 90


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.usefixtures("builtin_tiny")
def test_the_warm_model_learns_to_pass_the_tests_and_another_executor_agrees(tmp_path: Path, forked_python: Path):
    home = tmp_path / "kit"  # a checkout whose outputs are its own
    (home / "data").mkdir(parents=True)
    for name in PARTS:
        (home / name).symlink_to(ROOT / name)

    def call(*words: object) -> str:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PY": str(forked_python), "SFTPLAY_CACHE": str(ROOT / ".cache")}
        done = subprocess.run(
            list(map(str, words)), cwd=home, env=env, capture_output=True, text=True, timeout=3 * HANG_S, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    short = (f"train.max_steps={STEPS}", "train.eval_steps=20", f"train.save_steps={STEPS}")
    shown = call(home / "workflows" / "sft_then_grpo.sh", "--", *short)
    run = home / "outputs" / "toy-grpo"
    metrics = lines(run / "metrics.jsonl")
    rewards = [line["reward"] for line in metrics]
    assert len(metrics) == STEPS
    assert fmean(rewards[-10:]) - fmean(rewards[:3]) >= 0.4
    samples = [lines(run / "samples" / f"step-{step}.jsonl") for step in range(1, STEPS + 1)]
    assert fmean(line["rewards"]["tests"] == 1.0 for step in samples[-10:] for line in step) >= 0.7
    verdicts = [line["verdict"] for step in samples for line in step]
    assert "infra" not in {verdict["status"] for verdict in verdicts}
    assert {verdict.get("executor") for verdict in verdicts} <= {"bwrap", "landlock", None}
    measured = [json.loads((run / "eval" / f"step-{step}.json").read_text()) for step in (0, 20, STEPS)]
    assert {each["n"] for each in measured} == {N_HELD_OUT}
    assert measured[0]["pass"] <= 0.6  # greedy, and numbers that neither the warm model nor this run has learned from
    assert measured[-1]["pass"] >= 0.85
    assert metrics[-1]["sandbox/ok"] == pytest.approx(fmean(line["verdict"]["status"] == "ok" for line in samples[-1]))
    assert re.search(r"^reward +0\.\d+ +[01]\.\d+ +\+0\.\d+$", shown, re.MULTILINE)
    assert re.search(r"^pass@1, sampled +[\d.]+.% +[\d.]+.% +\+", shown, re.MULTILINE)
    assert "all agree" in shown
    assert 'id="learned"' in (run / "report.html").read_text()

    words = (
        "--config",
        "configs/run_grpo_toy.yaml",
        "--run",
        "toy-grpo",
        "--n",
        STEPS,
        "--json",
        "sandbox.executor=none",
    )
    found = json.loads(call(sys.executable, "-m", "sftplay", "reward-check", *words))
    counts = [(each["name"], each["n"], each["differ"]) for each in found]
    assert counts == [("tests", STEPS * 64, 0), ("syntax", STEPS * 64, 0)]


def test_with_weight_decay_constant_rewards_shrink_the_weights_and_nothing_else(inputs: Inputs, tmp_path: Path):
    options: dict[str, Any] = {
        "task_mode": "grpo", "tuning__mode": "full", "train__max_steps": 2, "train__effective_batch_size": 8,
        "rewards": [{"name": "e", "use": "regex", "options": {"pattern": "e", "whole": False}}],
        "grpo__num_generations": 4, "grpo__max_completion_length": 8, "grpo__placebo_reward": "constant",
    }  # fmt: skip
    run = train(tmp_path, inputs, **options, train__weight_decay=0.1)
    name, factor = "model.layers.0.mlp.up_proj.weight", 1.0
    for line in run.metrics:
        factor *= 1 - 0.1 * line["learning_rate"]
    before = AutoModelForCausalLM.from_pretrained(inputs.model).state_dict()[name]
    after = run.trainer.model.state_dict()[name]
    assert [line["zero_variance_share"] for line in run.metrics] == [1.0, 1.0]
    assert factor < 1
    assert not torch.equal(after, before)
    torch.testing.assert_close(after, factor * before)
