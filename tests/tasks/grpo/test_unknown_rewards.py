"""A completion whose reward for content has no value: TRL's own advantages, figures and silent groups go without it.

And what a line of metrics says of programs, cut-off ratios and fp16, next to hand counts and torch's own scaler.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from grpo_toy import grpo_trainer
from trl import GRPOTrainer

from sftplay.reward.reward_set import BatchRewards
from sftplay.reward.table import RewardValues
from sftplay.tasks.grpo.sampling import SamplingMixin
from sftplay.tasks.grpo.scoring import DynamicSampler, ScoredBatch, compute_program_figures, find_zero_variance_groups
from sftplay.tasks.grpo.watch import read_policy_clip_share

WEIGHTS = (1.0, 0.1)
CONTENT: list[float | None] = [1.0, 0.0, None, 1.0, 1.0, 1.0, 1.0, None]
FORM: list[float | None] = [1.0, 1.0, 1.0, 1.0, 1.0, 0.0, None, 1.0]
PAID = [1.1, 0.1, None, 1.1, 1.1, 1.0, 1.0, None]
"""Two groups of four. A form that is not known adds nothing; content that is not known leaves nothing to add to."""


def scored(content: list[float | None] = CONTENT, form: list[float | None] = FORM) -> BatchRewards:
    by_name = {"tests": RewardValues(list(content), ["the sandbox failed"]), "format": RewardValues(list(form), [])}
    return BatchRewards(by_name, [None] * len(content), frozenset({"tests"}))


def scored_batch(**columns: list[float | None]) -> ScoredBatch:
    found = scored(**columns)
    n = len(found.verdicts)
    rows = [10 * (at // 4) for at in range(n)]
    return ScoredBatch(weights=WEIGHTS, rows=rows, completions=[""] * n, rewards=found)


@pytest.mark.parametrize("scale", ["group", "batch"])
def test_trl_compares_known_completions_alone_and_an_unknown_one_has_no_advantage(scale: str, tmp_path: Path):
    class Paid(GRPOTrainer):
        def _calculate_rewards(self, *_: Any) -> torch.Tensor:
            return torch.tensor(scored_batch().make_reward_matrix())

    options = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "reward_weights": list(WEIGHTS)}
    rewards = [lambda **_: None, lambda **_: None]
    for number, reward in enumerate(rewards):
        reward.__name__ = f"r{number}"
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    trainer = grpo_trainer(tmp_path, rows=rows, reward=rewards, kind=Paid, scale_rewards=scale, **options)
    trainer.train()

    known = [[paid for paid in PAID[at : at + 4] if paid is not None] for at in (0, 4)]
    spreads = [stdev([*known[0], *known[1]])] * 2 if scale == "batch" else [stdev(group) for group in known]
    expected = [
        0.0 if paid is None else (paid - fmean(known[at // 4])) / (spreads[at // 4] + 1e-4)
        for at, paid in enumerate(PAID)
    ]
    assert list(trainer._logs["advantages"]) == pytest.approx(expected, abs=1e-5)


def test_figures_are_means_of_what_is_known():
    figures = scored_batch().compute_figures(4)
    known = [paid for paid in PAID if paid is not None]
    assert figures["reward"] == pytest.approx(fmean(known))
    assert figures["reward_std"] == pytest.approx(stdev(known))
    assert figures["zero_variance_share"] == 0
    assert figures["abstained"] == 3 / 8
    lost = scored_batch(content=[None] * 8).compute_figures(4)
    assert (lost["reward"], lost["reward_std"], lost["zero_variance_share"]) == (None, None, None)
    assert all(math.isnan(value) for line in scored_batch(content=[None] * 8).make_reward_matrix() for value in line)


def test_completions_of_equal_sums_and_other_parts_teach_where_each_reward_is_normalized(tmp_path: Path):
    parts = scored_batch(content=[1.0, 0.9] * 2 + [1.0] * 4, form=[0.0, 1.0] * 2 + [1.0] * 4)

    class Paid(GRPOTrainer):
        def _calculate_rewards(self, *_: Any) -> torch.Tensor:
            return torch.tensor(parts.make_reward_matrix())

    options = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "reward_weights": list(WEIGHTS)}
    rewards = [lambda **_: None, lambda **_: None]
    for number, reward in enumerate(rewards):
        reward.__name__ = f"r{number}"
    for aggregation in ("sum_then_normalize", "normalize_then_sum"):
        trainer = grpo_trainer(
            tmp_path / aggregation, rows=[{"prompt": "a"}, {"prompt": "b"}], reward=rewards, kind=Paid,
            multi_objective_aggregation=aggregation, **options,
        )  # fmt: skip
        trainer.train()
        advantages = torch.tensor(list(trainer._logs["advantages"])).view(2, 4)
        by_trl = [n for n, group in enumerate(advantages.abs() > 1e-3) if not group.any()]
        batch = replace(parts, normalizes_each=aggregation == "normalize_then_sum")
        assert find_zero_variance_groups(batch.compared_rewards, 4) == by_trl
        assert batch.compute_figures(4)["zero_variance_share"] == len(by_trl) / 2
    assert by_trl == [1]


def test_a_prompt_passes_no_turn_because_of_rewards_that_are_not_known():
    sizes: Any = {"prompts": [], "rows": [0, 10], "rounds": 0, "num_generations": 4}
    sampler = DynamicSampler(**sizes, seed=0, in_lockstep=False)
    sampler.record_sampled(scored_batch(content=[1.0, 1.0, None, 1.0] + [1.0] * 4, form=[1.0] * 8), tokens=[1] * 8)
    assert sampler.reserve.zero_variance == {10: 1}


TRIED: list[dict[str, Any] | None] = [
    {"how": "labelled", "status": "ok", "hidden_pass": True},
    {"how": "labelled", "status": "wrong", "hidden_pass": True},
    {"how": "unclosed", "status": "timeout", "hidden_pass": False},
    {"how": "none", "status": "no_code", "hidden_pass": False},
    {"status": "infra"},
]


def test_shares_of_what_became_of_programs_and_how_they_were_found_stand_in_a_line_of_metrics():
    figures = compute_program_figures(TRIED)
    statuses = {key.removeprefix("sandbox/"): value for key, value in figures.items() if key.startswith("sandbox/")}
    assert statuses == {
        "ok": 0.2, "wrong": 0.2, "runtime": 0.0, "syntax": 0.0, "timeout": 0.2, "memory": 0.0, "output": 0.0,
        "killed": 0.0, "tampered": 0.0, "infra": 0.2, "no_code": 0.2,
    }  # fmt: skip
    found = {key.removeprefix("found/"): value for key, value in figures.items() if key.startswith("found/")}
    assert found == {"labelled": 0.4, "unlabelled": 0.0, "unclosed": 0.2, "whole_text": 0.0, "none": 0.2}
    assert figures["hidden_pass"] == 0.5  # of the four that are known


@pytest.mark.parametrize(
    ("logs", "share"),
    [({"clip_ratio/region_mean": 0.0}, 0.0), ({"cispo_clip_ratio": 0.25, "loss": 1.0}, 0.25), ({"entropy": 1.0}, None)],
)
def test_the_share_of_cut_off_ratios_has_one_name_whatever_the_loss_is(logs, share):
    assert read_policy_clip_share(logs) == share


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
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(scaler=scaler), lr_scheduler=schedule, state=SimpleNamespace(global_step=3),
        _figures={}, take_held_out_figures=dict, sampling_totals={}, heartbeat=None,
        logprob_check=SimpleNamespace(take=lambda _: {}), variants=SimpleNamespace(take_figures=lambda _: {}),
    )  # fmt: skip
    figures = SamplingMixin.take_figures(trainer, {})
    assert (figures["loss_scale"], figures["skipped_steps"]) == (2.0**15, 1)
