"""Returns of episodes, against the table of the paper and arithmetic by hand."""

from __future__ import annotations

import pytest
import torch

from sftplay.tasks.score.update import (
    compute_batch_baseline,
    compute_explained_variance,
    compute_guide_return,
    compute_guide_reward,
    compute_rloo_baseline,
    compute_shaped_baseline,
    compute_turn_returns,
    subtract_baseline,
)

R1, R2 = torch.tensor([0.0, 0.0, 1.0, 1.0]), torch.tensor([0.0, 1.0, 0.0, 1.0])
NO_LEAK = torch.zeros(4)


def test_stage_2_rewards_changes_as_the_paper_says_and_stage_1_turn_2_alone():
    first, second = compute_turn_returns(R1, R2, stage=2, alpha=10.0)
    assert first is not None
    assert first.tolist() == [0, 0, 1, 1]
    assert second.tolist() == [0, 11, -10, 1]
    # With y2 wrong whatever y1 is: right first pays 1 - 0.5 * 10, wrong first 0.
    discounted, _ = compute_turn_returns(R1, R2, stage=2, alpha=10.0, turn_discount=0.5)
    assert discounted is not None
    assert discounted.tolist() == [0, 5.5, -4, 1.5]
    nothing, alone = compute_turn_returns(R1, R2, stage=1, alpha=10.0)
    assert nothing is None
    assert alone.tolist() == R2.tolist()


@pytest.mark.parametrize(
    ("kind", "expected"), [("outcome", [0, 1, 0, 1]), ("progress", [0, 1, -1, 0]), ("signed", [-1, 1, -1, 1])]
)
def test_a_hints_reward_follows_the_second_answer(kind, expected):
    assert compute_guide_reward(R1, R2, kind=kind, leak=NO_LEAK, leak_penalty=0.3).tolist() == expected
    leaking = compute_guide_reward(R1, R2, kind=kind, leak=torch.tensor([1, 0, 1, 0]), leak_penalty=0.3)
    assert leaking.tolist() == pytest.approx([paid - (0.3, 0)[n % 2] for n, paid in enumerate(expected)])


def test_the_value_is_added_to_a_hints_return_without_its_gradient():
    value = torch.tensor([0.5, 0.5, 0.25, 1.0], requires_grad=True)
    returns = compute_guide_return(R2, value, value_coef=0.01)
    assert returns.tolist() == pytest.approx([0.005, 1.005, 0.0025, 1.01])
    assert not returns.requires_grad
    assert compute_guide_return(R2, value, value_coef=0) is R2


def test_the_shaped_baseline_is_the_mean_return_where_the_value_is_right():
    # Four equally likely second rewards per r1: E[r2] = 0.75 after r1 = 0, 0.25 after r1 = 1.
    for r1, mean in ((0.0, 0.75), (1.0, 0.25)):
        r2 = torch.tensor([mean > 0.5, mean > 0.5, mean > 0.5, mean < 0.5]).float()
        value = r2.mean().expand(4)
        _, returns = compute_turn_returns(torch.full((4,), r1), r2, stage=2, alpha=10.0)
        baseline = compute_shaped_baseline(value, torch.full((4,), r1), stage=2, alpha=10.0)
        assert returns.mean().item() == pytest.approx(baseline[0].item())


def test_explained_variance_is_one_for_the_truth_and_nothing_for_the_mean():
    assert compute_explained_variance(R2, R2) == pytest.approx(1)
    assert compute_explained_variance(torch.full((4,), 0.5), R2) == pytest.approx(0)
    assert compute_explained_variance(R2, torch.ones(4)) == 0


def test_leave_one_out_leaves_out_the_episode_itself():
    returns = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0])
    assert compute_rloo_baseline(returns, group=3).tolist() == pytest.approx([0, 0.5, 0.5, 0.5, 0.5, 1])
    assert compute_batch_baseline(returns).tolist() == [0.5] * 6


def test_scaled_advantages_have_a_deviation_of_one_and_equal_returns_have_none():
    scaled = subtract_baseline(torch.tensor([11.0, -10.0, 0.0, 1.0]), torch.zeros(4), scales=True)
    assert torch.std(scaled).item() == pytest.approx(1, abs=1e-3)
    assert subtract_baseline(torch.ones(4), torch.ones(4), scales=True).tolist() == [0] * 4
