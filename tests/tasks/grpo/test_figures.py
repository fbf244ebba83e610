"""What a line of metrics says of programs, of cut-off ratios and of fp16, beside hand counts and torch's own scaler."""

from __future__ import annotations

from typing import Any

import torch

from sftplay.reward.calls import RewardValues
from sftplay.reward.reward_set import BatchRewards
from sftplay.tasks.grpo.rollouts import read_loss_scale
from sftplay.tasks.grpo.scoring import ScoredBatch

TRIED: list[dict[str, Any] | None] = [
    {"how": "labelled", "status": "ok", "hidden_pass": True},
    {"how": "labelled", "status": "wrong", "hidden_pass": True},
    {"how": "unclosed", "status": "timeout", "hidden_pass": False},
    {"how": "none", "status": "no_code", "hidden_pass": False},
    {"status": "infra"},
]


def judged(verdicts: list[dict[str, Any] | None]) -> ScoredBatch:
    n = len(verdicts)
    scored = BatchRewards({"tests": RewardValues([1.0] * n, [])}, verdicts)
    return ScoredBatch(names=("tests",), weights=(1.0,), rows=[0] * n, completions=[""] * n, rewards=scored)


def test_shares_of_what_became_of_programs_and_how_they_were_found_stand_in_a_line_of_metrics():
    figures = judged(TRIED).compute_figures(5)
    statuses = {key.removeprefix("sandbox/"): value for key, value in figures.items() if key.startswith("sandbox/")}
    assert statuses == {
        "ok": 0.2, "wrong": 0.2, "runtime": 0.0, "syntax": 0.0, "timeout": 0.2, "memory": 0.0, "output": 0.0,
        "killed": 0.0, "tampered": 0.0, "infra": 0.2, "no_code": 0.2,
    }  # fmt: skip
    found = {key.removeprefix("found/"): value for key, value in figures.items() if key.startswith("found/")}
    assert found == {"labelled": 0.4, "unlabelled": 0.0, "unclosed": 0.2, "whole_text": 0.0, "none": 0.2}
    assert figures["hidden_pass"] == 0.5  # of the four that are known


def test_a_step_that_the_scaler_skips_is_counted_and_halves_the_scale():
    weight = torch.nn.Parameter(torch.ones(1))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    for factor in (1.0, float("inf"), 1.0):  # as transformers' Trainer makes a step
        scaler.scale(weight.sum() * factor).backward()
        before, scale = weight.item(), scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= scale:
            assert weight.item() != before
            schedule.step()
        optimizer.zero_grad()
    assert read_loss_scale(scaler, steps=3, taken=schedule.last_epoch) == {"loss_scale": 2.0**15, "skipped_steps": 1}
