"""Answers and hints of one token can all be listed: gradients of sampled episodes beside the exact ones."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import pytest
import torch
from peft import LoraConfig, get_peft_model
from score_run import score_inputs, score_options
from small_run import write_small_run
from torch.nn.functional import cosine_similarity
from transformers import AutoModelForCausalLM, AutoTokenizer

from sftplay.config.load import load_config
from sftplay.data.load_prompts import Question
from sftplay.data.render.render import Renderer
from sftplay.model.builtin import ID
from sftplay.tasks.score.role_models import Role, RoleModels
from sftplay.tasks.score.sample_episodes import EpisodeSampler
from sftplay.tasks.score.update import (
    MinibatchSetup,
    PolicyGradients,
    compute_rloo_baseline,
    compute_turn_returns,
    subtract_baseline,
)

pytestmark = pytest.mark.slow

N, GROUP, ALPHA = 20_000, 4, 10.0
WORDS, RIGHT = len(ID), ID["4"]
PROBLEM = [ID[character] for character in "1+3="]


@pytest.fixture(scope="module")
def episode_sampler(tmp_path_factory: pytest.TempPathFactory) -> EpisodeSampler:
    home = tmp_path_factory.mktemp("exact")
    inputs = score_inputs(home, steps=60)
    cfg = load_config(write_small_run(home, inputs, **score_options(score__max_new_tokens=1, score__max_hint_tokens=1)))
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(inputs.model)
    model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    role_models = RoleModels(model, has_guide=True, guide_learns=True, has_value=False)
    for role in ("solver", "guide"):
        for parameter in role_models.trainable[role]:
            parameter.data.normal_(0, 0.1)
    tokenizer = AutoTokenizer.from_pretrained(inputs.model)
    return EpisodeSampler(cfg, role_models, renderer=Renderer.prove(tokenizer, None, samples=[]))


def exact_gradients(role_models: RoleModels) -> dict[str, torch.Tensor]:
    """Those of E[r1] in turn 1, of E[r2] for the guide and of E[r2 + alpha (r2 - r1)] in turn 2, over all episodes."""

    def chances(role: Role, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        with role_models.use_role(role) as model:
            return model(torch.tensor(prompts)).logits[:, -1].softmax(-1)

    words = range(WORDS)
    first = chances("solver", [PROBLEM])[0]
    hint = chances("guide", [[*PROBLEM, y1, ID["?"]] for y1 in words])
    second = chances("solver", [[*PROBLEM, y1, ID["?"], h, ID[">"]] for y1 in words for h in words])
    second = second.view(WORDS, WORDS, WORDS)
    right = (torch.arange(WORDS) == RIGHT).float()
    r1, r2 = right[:, None, None], right[None, None, :]

    def expected(paid: torch.Tensor, *, of: str) -> torch.Tensor:
        parts = {"t1": first[:, None, None], "guide": hint[:, :, None], "t2": second}
        joint = torch.ones(1)
        for name, part in parts.items():
            joint = joint * (part if name == of else part.detach())
        role = "guide" if of == "guide" else "solver"
        found = torch.autograd.grad((joint * paid).sum(), role_models.trainable[role], retain_graph=True)
        return torch.cat([each.flatten() for each in found])

    return {
        "t1": expected(r1, of="t1"), "guide": expected(r2, of="guide"), "t2": expected(r2 + ALPHA * (r2 - r1), of="t2"),
    }  # fmt: skip


def test_the_step_of_each_model_goes_where_the_exact_gradient_goes(episode_sampler: EpisodeSampler):
    role_models = episode_sampler.role_models
    assert isinstance(role_models, RoleModels)
    role_models.model.eval()
    with torch.no_grad():
        question = Question(0, [], "1+3=", {"answer": "4"})
        episodes = episode_sampler.sample_episodes([question] * N, numbers=range(N), seed=3, temperature=1.0)
    r1, r2 = (
        torch.tensor([float(action.ids == [RIGHT]) for action in actions])
        for actions in ([each.first for each in episodes], [each.second for each in episodes])
    )
    paid_first, paid_second = compute_turn_returns(r1, r2, stage=2, alpha=ALPHA)
    assert paid_first is not None
    update = PolicyGradients(
        role_models, episode_sampler.cfg.score.model_copy(update={"beta_guide": 0.0}),
        batch=MinibatchSetup(
            micro_batch=4000, n_episodes=N, pad=ID["<pad>"], backward=lambda loss: loss.backward(),
            context=nullcontext,
        ),
    )  # fmt: skip

    def gain(returns: torch.Tensor) -> torch.Tensor:
        return subtract_baseline(returns, compute_rloo_baseline(returns, group=GROUP), scales=False)

    def gradient(role: str) -> torch.Tensor:
        found = torch.cat([p.grad.flatten() for p in role_models.trainable[role] if p.grad is not None]).clone()
        role_models.model.zero_grad()
        return -found  # of what is to be made large, and not of the loss

    hints = [each.hint for each in episodes if each.hint is not None]
    sampled = {}
    update.learn(hints, "guide", beta=0.0, advantage=gain(r2), value_target=r2, n_tokens=N)
    sampled["guide"] = gradient("guide")
    for turn, paid in ((1, paid_first), (2, paid_second)):
        actions = [each.first if turn == 1 else each.second for each in episodes]
        update.learn(actions, f"t{turn}", advantage=gain(paid), beta=0.0, n_tokens=N)
        sampled[f"t{turn}"] = gradient("solver")
    for name, exact in exact_gradients(role_models).items():
        assert cosine_similarity(sampled[name], exact, dim=0) > 0.95, name
        assert sampled[name].norm().item() == pytest.approx(exact.norm().item(), rel=0.15), name
