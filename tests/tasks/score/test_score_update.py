"""The gradients of a step on a real model: what reaches the guide, and what the solver."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from sftplay.model.builtin import ID
from sftplay.model.recomputation import recompute
from sftplay.tasks.score.role_models import ADAPTER_NAMES, RoleModels
from sftplay.tasks.score.sample_episodes import Action
from sftplay.tasks.score.section import ScoreConfig
from sftplay.tasks.score.update import ActionBatch, MinibatchSetup, PolicyGradients, score_actions

ACTIONS = [
    Action(prompt=[ID[c] for c in prompt], ids=[ID[answer], ID["<end>"]], log_probs=[-1.0, -0.1], is_truncated=False)
    for prompt, answer in (("1+3=2?", "4"), ("0+0=", "0"), ("4+4=3?3>", "3"))
]
N = len(ACTIONS)


@pytest.fixture
def role_models(two_adapters: Callable[[], RoleModels]) -> RoleModels:
    return two_adapters()


def update(role_models: RoleModels, **changes) -> PolicyGradients:
    score = ScoreConfig(max_new_tokens=2, max_hint_tokens=2, **changes)
    batch = MinibatchSetup(
        micro_batch=2, n_episodes=N, pad=ID["<pad>"], backward=lambda loss: loss.backward(),
        context=nullcontext,
    )  # fmt: skip
    return PolicyGradients(role_models, score, batch=batch)


def gradients(role_models: RoleModels, part: str) -> torch.Tensor:
    pieces = [torch.zeros_like(p) if p.grad is None else p.grad for p in role_models.trainable[part]]
    flat = torch.cat([piece.flatten() for piece in pieces]).clone()
    role_models.model.zero_grad()
    return flat


def of_the_value_loss(role_models: RoleModels, **changes) -> torch.Tensor:
    """The guide's gradient where nothing else is learned."""
    step = update(role_models, beta_guide=0.0, **changes)
    step.learn(
        ACTIONS,
        "guide",
        beta=step.score.beta_guide,
        advantage=torch.zeros(N),
        value_target=torch.tensor([1.0, 0.0, 1.0]),
        n_tokens=6,
    )
    return gradients(role_models, "guide")


def test_the_guide_gets_the_value_losss_gradient_in_shared_trunk_alone_and_in_proportion(role_models: RoleModels):
    one = of_the_value_loss(role_models, value_flow="shared_trunk", value_coef=1.0)
    assert one.norm() > 1e-4
    for value_coef in (0.1, 0.01, 0.001):
        mine = of_the_value_loss(role_models, value_flow="shared_trunk", value_coef=value_coef)
        torch.testing.assert_close(mine, one * value_coef, rtol=1e-4, atol=1e-9)
    stopped = of_the_value_loss(role_models, value_flow="stop", value_coef=1.0)
    assert stopped.norm() == 0


def test_straight_through_moves_the_guide_and_leaves_the_head_to_its_own_loss(role_models: RoleModels):
    mine = of_the_value_loss(role_models, value_flow="straight_through", value_coef=0.1)
    assert mine.norm() > 1e-6
    twice = of_the_value_loss(role_models, value_flow="straight_through", value_coef=0.2)
    torch.testing.assert_close(twice, 2 * mine, rtol=1e-4, atol=1e-9)


def test_scores_are_those_of_a_plain_forward_pass_and_micro_batches_change_nothing(role_models: RoleModels):
    whole = ActionBatch.from_actions(ACTIONS, pad=ID["<pad>"], device="cpu")
    scores = score_actions(role_models, whole, role="solver", temperature=0.7, kl="full")
    for number, action in enumerate(ACTIONS):
        ids = torch.tensor([action.prompt + action.ids])
        place = len(action.prompt) - 1
        mine = (role_models.model(ids).logits[0, place:-1] / 0.7).log_softmax(-1)
        with role_models.reference("solver"):
            frozen = (role_models.model(ids).logits[0, place:-1] / 0.7).log_softmax(-1)
        kl = torch.nn.functional.kl_div(frozen, mine, log_target=True, reduction="none").sum(-1)
        chosen = mine.gather(-1, torch.tensor(action.ids)[:, None])[:, 0]
        torch.testing.assert_close(scores.log_probs[number], chosen, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(scores.kl[number], kl, atol=1e-5, rtol=1e-4)
    found = []
    for micro_batch in (1, 3):
        step = update(role_models)
        object.__setattr__(step.batch, "micro_batch", micro_batch)
        step.learn(ACTIONS, "t2", advantage=torch.tensor([1.0, -2.0, 0.5]), beta=0.1, n_tokens=6)
        found.append(gradients(role_models, "solver"))
    torch.testing.assert_close(*found, atol=1e-6, rtol=1e-4)


def test_layers_that_are_computed_anew_find_the_adapter_of_their_role(role_models: RoleModels):
    found = []
    for recomputes in (False, True):
        if recomputes:
            recompute(role_models.model)
            role_models.train()
        step = update(role_models)
        step.learn(
            ACTIONS,
            "guide",
            beta=step.score.beta_guide,
            advantage=torch.ones(N),
            value_target=torch.ones(N),
            n_tokens=6,
        )
        found.append(gradients(role_models, "guide"))
    assert found[0].norm() > 1e-4
    torch.testing.assert_close(*found)


def test_a_role_uses_the_adapter_that_peft_sets(digits: Path):
    base = AutoModelForCausalLM.from_pretrained(digits)
    targets = ["q_proj", "down_proj"]
    config = LoraConfig(r=4, target_modules=targets, modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    role_models = RoleModels(get_peft_model(base, config), has_guide=True, guide_learns=True, has_value=False)
    torch.manual_seed(0)
    for name, parameter in role_models.model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            parameter.data.normal_(0, 0.05)

    def state(model: Any) -> Any:
        layers = {
            name: each.active_adapters for name, each in model.named_modules() if hasattr(each, "active_adapters")
        }
        return model.active_adapter, layers, model(torch.tensor([ACTIONS[0].prompt])).logits.tolist()

    trained = {name: parameter.requires_grad for name, parameter in role_models.model.named_parameters()}
    states = {}
    for role, adapter in ADAPTER_NAMES.items():
        with role_models.use_role(role) as model:
            states[role] = state(model)
            assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == trained
            model.set_adapter(adapter)
            assert states[role] == state(model)
    assert states["solver"] != states["guide"]


def test_the_reference_has_no_dropout_and_the_role_that_learns_keeps_its_own(role_models: RoleModels):
    for layer in role_models.model.base_model.model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    batch = ActionBatch.from_actions(ACTIONS, pad=ID["<pad>"], device="cpu")
    role_models.train()
    with torch.no_grad(), role_models.reference("solver") as frozen:
        first, again = (frozen(input_ids=batch.ids).logits for _ in range(2))
    assert torch.equal(first, again)
    assert role_models.model.training
    with torch.no_grad(), role_models.use_role("solver") as solver:
        assert not torch.equal(solver(input_ids=batch.ids).logits, solver(input_ids=batch.ids).logits)
