"""Losses of preferences where numbers are large, small or equal, and what the rest of a run is told."""

from __future__ import annotations

import math

import pytest
import torch
from preference_trainers import config_of

from sftplay.tasks.preference.losses import compute_rewards, kto_losses, orpo_losses, pair_losses

TOKENS = torch.tensor([[4, 8]])


@pytest.mark.parametrize("task", ["dpo", "orpo", "simpo"])
@pytest.mark.parametrize("logps", [[-1e4, -1.0], [-1.0, -1e4], [-1e-9, -20.0], [0.0, 0.0]])
def test_losses_and_gradients_stay_finite_for_any_probabilities(task: str, logps: list[float]):
    sums = torch.tensor([logps], requires_grad=True)
    loss = pair_losses(config_of(task), sums, TOKENS, None)
    loss.sum().backward()
    assert loss.isfinite().all()
    assert sums.grad is not None
    assert sums.grad.isfinite().all()


def test_the_log_odds_of_orpo_are_exact_near_probability_1_and_near_0():
    # float64: log(p / (1 - p)) of p = exp(a)
    for first, second in ((-1e-4, -2.0), (-12.0, -1e-3)):
        odds = [a - math.log(-math.expm1(a)) for a in (first, second)]
        wanted = -first + 0.1 * math.log1p(math.exp(odds[1] - odds[0]))
        assert orpo_losses(torch.tensor([[first, second]]), 0.1).item() == pytest.approx(wanted, rel=1e-5)


def test_without_a_reference_the_log_ratios_are_the_log_probabilities():
    sums = torch.tensor([[-10.0, -30.0]])
    for task in ("dpo", "ipo"):
        cfg = config_of(task, reference="none")
        assert torch.equal(pair_losses(cfg, sums, TOKENS, None), pair_losses(cfg, sums, TOKENS, torch.zeros(1, 2)))
        assert compute_rewards(cfg, sums, TOKENS, None).tolist() == [[pytest.approx(-1.0), pytest.approx(-3.0)]]


def test_rewards_of_losses_without_a_reference_are_means_over_tokens():
    sums = torch.tensor([[-10.0, -30.0]])
    assert compute_rewards(config_of("simpo"), sums, TOKENS, None).tolist() == [[-5.0, -7.5]]
    found = compute_rewards(config_of("orpo"), sums, TOKENS, None)
    assert found.tolist() == [[pytest.approx(-0.25), pytest.approx(-0.375)]]


def test_a_weight_of_kto_scales_only_its_kind_of_answers():
    ratios, wanted = torch.tensor([3.0, 3.0]), torch.tensor([True, False])
    plain = kto_losses(config_of("kto"), ratios, wanted, reference_point=1.0)
    heavy = kto_losses(config_of("kto", desirable_weight=2.0), ratios, wanted, reference_point=1.0)
    assert plain.tolist() == pytest.approx([1 - 1 / (1 + math.exp(-0.2)), 1 - 1 / (1 + math.exp(0.2))], rel=1e-6)
    assert (heavy / plain).tolist() == pytest.approx([2.0, 1.0])


def test_an_extreme_answer_of_kto_has_a_loss_to_full_precision():
    loss = kto_losses(config_of("kto", beta=1.0), torch.tensor([40.0]), torch.tensor([True]), reference_point=0.0)
    assert loss.item() == pytest.approx(math.exp(-40), rel=1e-5)
