"""What episodes are paid, against the table of the paper and arithmetic by hand."""

from __future__ import annotations

import pytest
import torch

from sftplay.tasks.score.advantages import (
    advantages,
    batch_baseline,
    explained_variance,
    guide_return,
    guide_reward,
    leave_one_out_baseline,
    shaped_baseline,
    turn_returns,
)

R1, R2 = torch.tensor([0.0, 0.0, 1.0, 1.0]), torch.tensor([0.0, 1.0, 0.0, 1.0])
NO_LEAK = torch.zeros(4)


def test_stage_2_pays_changes_as_the_paper_says():
    first, second = turn_returns(R1, R2, stage=2, alpha=10.0)
    assert first is not None
    assert first.tolist() == [0, 0, 1, 1]
    assert second.tolist() == [0, 11, -10, 1]


def test_stage_1_pays_turn_2_alone():
    first, second = turn_returns(R1, R2, stage=1, alpha=10.0)
    assert first is None
    assert second.tolist() == R2.tolist()


def test_a_turn_discount_above_one_over_alpha_punishes_turn_1_for_being_right():
    # With y2 wrong whatever y1 is: right first pays 1 - 0.5 * 10, wrong first 0.
    first, _ = turn_returns(R1, R2, stage=2, alpha=10.0, turn_discount=0.5)
    assert first is not None
    assert first.tolist() == [0, 5.5, -4, 1.5]


@pytest.mark.parametrize(
    ("kind", "paid"), [("outcome", [0, 1, 0, 1]), ("progress", [0, 1, -1, 0]), ("signed", [-1, 1, -1, 1])]
)
def test_a_hint_is_paid_for_the_second_answer(kind, paid):
    assert guide_reward(R1, R2, kind=kind, leak=NO_LEAK, leak_penalty=0.3).tolist() == paid


@pytest.mark.parametrize(("leak", "paid"), [([1, 1, 1, 1], -0.3), ([0, 0, 0, 0], 0.0), ([1, 0, 1, 0], -0.15)])
def test_each_leak_costs_its_penalty(leak, paid):
    reward = guide_reward(R1, R2, kind="outcome", leak=torch.tensor(leak), leak_penalty=0.3)
    assert (reward - R2).mean().item() == pytest.approx(paid)


def test_the_value_is_added_to_a_hints_return_without_its_gradient():
    value = torch.tensor([0.5, 0.5, 0.25, 1.0], requires_grad=True)
    paid = guide_return(R2, value, value_coef=0.01)
    assert paid.tolist() == pytest.approx([0.005, 1.005, 0.0025, 1.01])
    assert not paid.requires_grad
    assert guide_return(R2, value, value_coef=0) is R2


def test_the_shaped_baseline_is_the_mean_return_where_the_value_is_right():
    # Four equally likely second rewards per r1: E[r2] = 0.75 after r1 = 0, 0.25 after r1 = 1.
    for r1, mean in ((0.0, 0.75), (1.0, 0.25)):
        r2 = torch.tensor([mean > 0.5, mean > 0.5, mean > 0.5, mean < 0.5]).float()
        value = r2.mean().expand(4)
        _, paid = turn_returns(torch.full((4,), r1), r2, stage=2, alpha=10.0)
        baseline = shaped_baseline(value, torch.full((4,), r1), stage=2, alpha=10.0)
        assert paid.mean().item() == pytest.approx(baseline[0].item())


def test_explained_variance_is_one_for_the_truth_and_nothing_for_the_mean():
    assert explained_variance(R2, R2) == pytest.approx(1)
    assert explained_variance(torch.full((4,), 0.5), R2) == pytest.approx(0)
    assert explained_variance(R2, torch.ones(4)) == 0


def test_leave_one_out_leaves_out_the_episode_itself():
    returns = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0])
    assert leave_one_out_baseline(returns, group=3).tolist() == pytest.approx([0, 0.5, 0.5, 0.5, 0.5, 1])
    assert batch_baseline(returns).tolist() == [0.5] * 6


def test_scaled_advantages_have_a_deviation_of_one_and_equal_returns_have_none():
    scaled = advantages(torch.tensor([11.0, -10.0, 0.0, 1.0]), torch.zeros(4), scales=True)
    assert torch.std(scaled).item() == pytest.approx(1, abs=1e-3)
    assert advantages(torch.ones(4), torch.ones(4), scales=True).tolist() == [0] * 4
