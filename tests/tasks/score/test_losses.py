"""Policy gradients and KL, against sums over all episodes and over the whole vocabulary."""

from __future__ import annotations

import pytest
import torch

from sftplay.tasks.score.update import (
    clipped_loss,
    full_kl,
    gather_log_probs,
    k3_kl,
    masked_mean,
    policy_loss,
    sum_log_probs,
)

WORDS = 5


def test_the_loss_of_a_batch_is_the_sum_over_its_parts_and_padding_counts_nothing():
    torch.manual_seed(0)
    log_probs, advantage = torch.randn(6, 3), torch.randn(6)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0]] * 2).float()
    whole = policy_loss(log_probs, mask, advantage=advantage, longest=3, n_episodes=6)
    parts = [
        policy_loss(log_probs[part], mask[part], advantage=advantage[part], longest=3, n_episodes=6)
        for part in (slice(0, 4), slice(4, 6))
    ]
    torch.testing.assert_close(whole, sum(parts))
    by_hand = -sum(
        advantage[n] * sum(log_probs[n, t] for t in range(3) if mask[n, t]) / 3 for n in range(6)
    ) / 6  # fmt: skip
    torch.testing.assert_close(whole, by_hand)
    assert sum_log_probs(log_probs, mask, longest=3)[1] == log_probs[1, 0] / 3


def test_k3_expects_the_full_kl_and_its_gradient():
    shape = (WORDS, WORDS, WORDS)
    table = torch.randn(shape, generator=torch.Generator().manual_seed(3), requires_grad=True)
    reference = torch.randn(shape, generator=torch.Generator().manual_seed(5)).log_softmax(-1)
    log_probs = table.log_softmax(-1)
    full = full_kl(log_probs, reference).mean()
    expected = (log_probs.detach().exp() * k3_kl(log_probs, reference, sampled=log_probs)).sum(-1).mean()
    torch.testing.assert_close(full, expected)
    exact, estimated = (torch.autograd.grad(each, table, retain_graph=True)[0] for each in (full, expected))
    assert exact.norm() > 0.01
    torch.testing.assert_close(exact, estimated)
    samples = torch.multinomial(log_probs.detach().exp().view(-1, WORDS), 8_000, replacement=True).view(5, 5, -1)
    tokens = samples.permute(2, 0, 1)
    chosen, frozen = (gather_log_probs(each.expand(len(tokens), *shape), tokens) for each in (log_probs, reference))
    sampled = k3_kl(chosen, frozen, sampled=chosen)
    assert sampled.mean().item() == pytest.approx(full.item(), rel=0.02)
    values, mask = torch.tensor([[1.0, 5.0], [2.0, 3.0]]), torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    assert masked_mean(values, mask, n_tokens=3).item() == pytest.approx(2)  # over action tokens


@pytest.mark.parametrize("advantage", [1.5, -0.5])
def test_the_clipped_loss_is_the_enumerated_one_and_so_is_its_gradient(advantage):
    # All actions of one token out of 5, each weighted by its probability at sampling time.
    old = torch.tensor([0.4, 0.3, 0.1, 0.15, 0.05])
    new = torch.tensor([0.2, 0.33, 0.17, 0.14, 0.16])
    log_probs = new.log().requires_grad_()
    given = {"sampled": old.log()[:, None], "advantage": advantage * old, "epsilon": 0.2}
    loss, _, was_clipped = clipped_loss(log_probs[:, None], torch.ones(5, 1), longest=1, n_episodes=1, **given)
    objective, slopes, cut = 0.0, [], []
    for p, q in zip(new.tolist(), old.tolist(), strict=True):
        ratio = p / q
        bounded = min(max(ratio, 0.8), 1.2)
        objective += q * min(ratio * advantage, bounded * advantage)
        is_clipped = bounded * advantage < ratio * advantage
        cut.append(float(is_clipped))
        slopes.append(0.0 if is_clipped else -q * advantage * ratio)
    assert loss.item() == pytest.approx(-objective, rel=1e-6)
    assert was_clipped[:, 0].tolist() == cut
    assert 0 < sum(cut) < 5
    (gradient,) = torch.autograd.grad(loss, log_probs)
    assert gradient.tolist() == pytest.approx(slopes, rel=1e-5)


def test_where_nothing_has_moved_the_clipped_gradient_is_that_of_the_plain_loss_and_padding_counts_nothing():
    torch.manual_seed(0)
    log_probs = torch.randn(4, 3).log_softmax(-1).requires_grad_()
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 0, 0]]).float()
    given = {"advantage": torch.tensor([1.0, -2.0, 0.0, 0.5]), "longest": 3, "n_episodes": 4}
    plain = policy_loss(log_probs, mask, **given)
    clipped, ratio, is_clipped = clipped_loss(log_probs, mask, sampled=log_probs * mask, epsilon=0.2, **given)
    assert torch.equal(ratio * mask, mask)
    assert not (is_clipped * mask).any()
    wanted, mine = (torch.autograd.grad(loss, log_probs)[0] for loss in (plain, clipped))
    assert torch.equal(mine, wanted)
