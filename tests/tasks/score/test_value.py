"""How far the gradient of the value goes, and the target critic."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import nn

from sftplay.tasks.score.role_models import (
    Critic,
    CriticInputs,
    PaddedTokens,
    TextEncoder,
    ValueHead,
    critic_loss,
    soft_update,
    straight_through,
    value_loss,
)

TARGET = torch.tensor([0.0, 1.0, 1.0])


def test_stop_teaches_the_head_whatever_the_coefficient():
    torch.manual_seed(1)
    layer, head, inputs = nn.Linear(4, 6), ValueHead(6), torch.randn(3, 4)
    loss = value_loss(head, layer(inputs), target=TARGET, flow="stop", value_coef=0.001, n_episodes=3)
    by_hand = (torch.sigmoid(head.linear(layer(inputs)))[:, 0] - TARGET).square().mean()
    torch.testing.assert_close(loss, by_hand)


def test_straight_through_embeds_the_tokens_and_learns_by_the_mixture():
    torch.manual_seed(2)
    logits, embedding = torch.randn(2, 5, requires_grad=True), torch.randn(5, 3)
    tokens, weights = torch.tensor([1, 4]), torch.randn(3)
    embedded = straight_through(logits.log_softmax(-1), tokens, embedding=embedding)
    torch.testing.assert_close(embedded, embedding[tokens])
    (mine,) = torch.autograd.grad((embedded @ weights).sum(), logits)
    (mixture,) = torch.autograd.grad((logits.softmax(-1) @ embedding @ weights).sum(), logits)
    torch.testing.assert_close(mine, mixture)


def tokens(*rows):
    return PaddedTokens.from_rows(rows)


def test_what_an_encoder_says_of_a_text_does_not_depend_on_its_neighbours():
    torch.manual_seed(5)
    encoder = TextEncoder(9, 4)
    together, alone = encoder(tokens([1, 2], [3, 4, 5, 6])), encoder(tokens([1, 2]))
    torch.testing.assert_close(together[:1], alone)


def test_a_target_critic_moves_by_the_same_share_at_each_update():
    torch.manual_seed(3)
    critic, start = Critic(7, 8), Critic(7, 8)
    target_critic = deepcopy(start).requires_grad_(False)
    assert not any(p.requires_grad for p in target_critic.parameters())
    for _ in range(5):
        soft_update(target_critic, critic, tau=0.1)
    for mine, its, began in zip(target_critic.parameters(), critic.parameters(), start.parameters(), strict=True):
        torch.testing.assert_close((mine - its).abs(), (began - its).abs() * 0.9**5, rtol=1e-4, atol=1e-6)


def test_the_critic_learns_returns_and_what_lies_ahead_of_known_episodes_alone():
    torch.manual_seed(4)
    critic = Critic(7, 8)
    target_critic = deepcopy(critic).requires_grad_(False)
    first = CriticInputs(tokens([1, 2], [1, 2]), tokens([3], [4]), tokens([4], [3]))
    second = CriticInputs(tokens([1, 3], [1, 4]), tokens([5], [6]), tokens([6], [5]))
    returns = torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0])
    known = {"turns": (first, second), "returns": returns, "weight": torch.ones(2), "n_episodes": 2}
    losses = critic_loss(critic, target_critic, discount=0.5, **known)
    ahead = target_critic.v_values(second.state).min(0).values
    q1 = critic.q_values(first.state, first.answer)
    by_hand = sum((q1[twin] - (returns[0] + 0.5 * ahead)).square().mean() for twin in range(2)) / 2
    torch.testing.assert_close(losses["q1"], by_hand)
    half = critic_loss(
        critic, target_critic, discount=0.0, **{**known, "weight": torch.tensor([1.0, 0.0]), "n_episodes": 1}
    )
    first, second = (
        CriticInputs(*(PaddedTokens(part.ids[:1], part.lengths[:1]) for part in turn)) for turn in (first, second)
    )
    alone = critic_loss(
        critic, target_critic, discount=0.0, turns=(first, second), returns=(returns[0][:1], returns[1][:1]),
        weight=torch.ones(1), n_episodes=1,
    )  # fmt: skip
    torch.testing.assert_close(half, alone)
