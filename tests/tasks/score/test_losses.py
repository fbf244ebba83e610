"""Policy gradients and KL, against sums over all episodes and over the whole vocabulary."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cosine_similarity

from sftplay.tasks.score.losses import (
    clipped_loss,
    compute_rloo_baseline,
    compute_turn_returns,
    full_kl,
    gather_log_probs,
    k3_kl,
    masked_mean,
    policy_loss,
    subtract_baseline,
    sum_log_probs,
)

WORDS, RIGHT, GROUP = 5, 2, 4
PROBLEMS = 5_000
"""20,000 episodes."""


@pytest.fixture
def tables():
    """Logits of turn 1 [y1], of hints [y1, h] and of turn 2 [y1, h, y2]: two models with actions of one token."""
    generator = torch.Generator().manual_seed(3)
    shapes = ((WORDS,), (WORDS, WORDS), (WORDS, WORDS, WORDS))
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


def exact_gradients(tables, alpha):
    """Those of E[r1] for turn 1, of E[r2] for the guide and of E[r2 + alpha (r2 - r1)] for turn 2, by summing up all
    episodes."""
    first, hints, second = (table.log_softmax(-1).exp() for table in tables)
    right = torch.arange(WORDS) == RIGHT
    r1, r2 = right[:, None, None].double(), right[None, None, :].double()
    joint = first[:, None, None] * hints[:, :, None] * second
    wanted = ((tables[0], r1), (tables[1], r2), (tables[2], r2 + alpha * (r2 - r1)))
    return [torch.autograd.grad((joint * paid).sum(), table, retain_graph=True)[0] for table, paid in wanted]


def test_the_sampled_gradient_of_each_model_is_the_exact_one(tables):
    alpha, n = 10.0, PROBLEMS * GROUP
    generator = torch.Generator().manual_seed(4)

    def sample(logits):
        return torch.multinomial(logits.softmax(-1).detach(), 1, generator=generator).squeeze(1)

    y1 = sample(tables[0].expand(n, -1))
    hint = sample(tables[1][y1])
    y2 = sample(tables[2][y1, hint])
    r1, r2 = (y1 == RIGHT).float(), (y2 == RIGHT).float()
    paid_first, paid_second = compute_turn_returns(r1, r2, stage=2, alpha=alpha)
    mask = torch.ones(n, 1)
    log_probs = (
        tables[0].log_softmax(-1)[y1], tables[1].log_softmax(-1)[y1, hint], tables[2].log_softmax(-1)[y1, hint, y2],
    )  # fmt: skip
    for table, log_prob, paid, exact in zip(
        tables, log_probs, (paid_first, r2, paid_second), exact_gradients(tables, alpha), strict=True
    ):
        advantage = subtract_baseline(paid, compute_rloo_baseline(paid, group=GROUP), scales=False)
        loss = policy_loss(log_prob[:, None], mask, advantage=advantage, longest=1, n_episodes=n)
        (sampled,) = torch.autograd.grad(-loss, table)
        assert cosine_similarity(sampled.flatten(), exact.flatten(), dim=0) > 0.95
        assert sampled.norm().item() == pytest.approx(exact.norm().item(), rel=0.1)


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


def test_k3_expects_the_full_kl_and_its_gradient(tables):
    reference = torch.randn(WORDS, WORDS, WORDS, generator=torch.Generator().manual_seed(5)).log_softmax(-1)
    log_probs = tables[2].log_softmax(-1)
    full = full_kl(log_probs, reference).mean()
    expected = (log_probs.detach().exp() * k3_kl(log_probs, reference, sampled=log_probs)).sum(-1).mean()
    torch.testing.assert_close(full, expected)
    exact, estimated = (torch.autograd.grad(each, tables[2], retain_graph=True)[0] for each in (full, expected))
    assert exact.norm() > 0.01
    torch.testing.assert_close(exact, estimated)
    samples = torch.multinomial(log_probs.detach().exp().view(-1, WORDS), 8_000, replacement=True).view(5, 5, -1)
    tokens = samples.permute(2, 0, 1)
    shape = (len(tokens), WORDS, WORDS, WORDS)
    chosen, frozen = (gather_log_probs(each.expand(shape), tokens) for each in (log_probs, reference))
    sampled = k3_kl(chosen, frozen, sampled=chosen)
    assert sampled.mean().item() == pytest.approx(full.item(), rel=0.02)


def test_kl_is_the_mean_over_action_tokens():
    values, mask = torch.tensor([[1.0, 5.0], [2.0, 3.0]]), torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    assert masked_mean(values, mask, n_tokens=3).item() == pytest.approx(2)


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
