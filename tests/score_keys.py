"""What keys of the section `score` change in a run or in its advantages, for the table of all keys."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from in_process import Finished, built
from score_run import PROMPTS, score_inputs, score_options

from sftplay.tasks.score.role_models import SeparateValue, ValueHead
from sftplay.tasks.score.section import ScoreConfig
from sftplay.tasks.score.update import (
    EpisodeRewards,
    MinibatchSetup,
    PolicyGradients,
    choose_kl_coefficients,
    compute_advantages,
)

Check = Callable[[Any], None]

CHANGES = {
    "score__temperature": 0.5,
    "score__max_new_tokens": 4,
    "score__max_hint_tokens": 3,
    "score__solver_learning_rate": 0.5,
    "score__guide_learning_rate": 0.25,
    "score__value_learning_rate": 0.125,
    "score__episodes_per_problem": 2,
    "score__stage2_steps": 5,
    "score__advantage": "critic",
    "score__critic": {"learning_rate": 0.75, "tau": 0.5, "width": 12},
    "score__value": "separate",
    "score__value_flow": "stop",
    "score__prompts": {**PROMPTS, "solve": "3{problem}", "static_hint": "3", "right_hint": "4{answer}"},
}

REWARDS = EpisodeRewards(
    first=torch.tensor([0.0, 1.0, 0.0, 1.0]),
    second=torch.tensor([1.0, 1.0, 0.0, 0.0]),
    is_known=torch.ones(4),
    form_first=torch.tensor([1.0, 0.0, 0.0, 0.0]),
    form_second=torch.tensor([0.0, 0.0, 0.0, 1.0]),
    leak=torch.tensor([1.0, 0.0, 0.0, 0.0]),
    value=torch.tensor([0.9, 0.8, 0.2, 0.1]),
)


@cache
def make_pair(home: Path) -> list[Finished]:
    """A plain run and one with `CHANGES`, up to their first step. Rewards are not asked."""
    inputs = score_inputs(home / "score", steps=1)
    runs = []
    for n, changes in enumerate(({}, CHANGES)):
        runs.append(built(home / f"score-{n}", inputs, **score_options(**{"train__max_steps": None, **changes})))
        runs[-1].trainer.reward_scorer.rewards.close()  # their processes would outlive the tests
    return runs


def seen(look: Callable[[Finished], Any], before: Any, after: Any) -> Check:
    """`look` sees these in the plain run and in the changed one."""

    def check(bench: Any) -> None:
        assert [look(run) for run in make_pair(bench.home)] == [before, after]

    return check


def changes_advantages(key: str, value: Any, **usual: Any) -> Check:
    """The key changes an advantage of stage 2."""

    def check(_: Any) -> None:
        kept = {"scale": "none", "advantage": "rloo", "episodes_per_problem": 2, **usual}
        before, after = (
            compute_advantages(REWARDS, ScoreConfig(**{**kept, **more}), stage=2) for more in ({}, {key: value})
        )
        assert any(not torch.equal(old, new) for old, new in zip(before[:3], after[:3], strict=True))

    return check


def log_prob_temperature(run: Finished) -> float:
    """The temperature at which the first sampled token has its recorded log-probability."""
    sampler = run.trainer.episode_sampler
    temperature = run.cfg.score.temperature
    with torch.no_grad(), run.trainer.role_models.use_role("solver") as model:
        (episode,) = sampler.sample_episodes([run.trainer.questions[0]], numbers=[0], seed=1, temperature=temperature)
        scores = model.eval()(torch.tensor([episode.first.prompt])).logits[0, -1]
    errors = {
        t: abs((scores / t).log_softmax(-1)[episode.first.ids[0]].item() - episode.first.log_probs[0])
        for t in (1.0, 0.5)
    }
    return min(errors, key=errors.__getitem__)


def rate(part: int) -> Callable[[Finished], float | None]:
    def look(run: Finished) -> float | None:
        groups = run.trainer.create_optimizer().param_groups
        return groups[part]["lr"] if part < len(groups) else None

    return look


def decode_hint(kind: Any) -> Callable[[Finished], str]:
    def look(run: Finished) -> str:
        sampler, question = run.trainer.episode_sampler, run.trainer.questions[0]
        with torch.no_grad():
            (episode,) = sampler.sample_episodes([question], numbers=[0], seed=1, temperature=0.0, hints=kind)
        return str(sampler.tokenizer.decode(episode.hint_ids))

    return look


def critic_width(run: Finished) -> int | None:
    critic = run.trainer.role_models.critic
    return critic and critic.encoder.recurrent.hidden_size


def share_taken_over(run: Finished) -> float | None:
    """How far the target critic follows one step of the critic."""
    role_models, optimizer = run.trainer.role_models, run.trainer.create_optimizer()
    if not role_models.critic:
        return None
    online, target = next(role_models.critic.parameters()), next(role_models.target_critic.parameters())
    online.grad, before = torch.ones_like(online), target.clone()
    optimizer.step()
    optimizer.zero_grad()
    return round(float(((target - before) / (online.detach() - before)).mean()), 4)


def changes_gradient(key: str, *values: Any) -> Check:
    """The key changes the gradient of the guide, whose weights have moved a little."""

    def check(bench: Any) -> None:
        run = make_pair(bench.home)[0]
        role_models, sampler = run.trainer.role_models, run.trainer.episode_sampler
        setup = MinibatchSetup(
            micro_batch=4, n_episodes=4, pad=0, backward=lambda loss: loss.backward(), context=nullcontext
        )
        with torch.no_grad():
            played = sampler.sample_episodes([run.trainer.questions[0]] * 4, numbers=range(4), seed=1, temperature=1.0)
        hints, weights, gradients = [episode.hint for episode in played], role_models.trainable["guide"], []
        for value in values:
            score = run.cfg.score.model_copy(update={"beta_guide": 1.0, key: value})
            for weight in weights:
                weight.data.add_(1e-2)
            update = PolicyGradients(role_models, score, batch=setup)
            update.learn(hints, "guide", beta=score.beta_guide, advantage=torch.ones(4), n_tokens=8)
            for weight in weights:
                weight.data.sub_(1e-2)
            gradients.append(torch.cat([weight.grad.flatten() for weight in weights if weight.grad is not None]))
            role_models.model.zero_grad()
        assert not torch.equal(*gradients)

    return check


def first_prompt(run: Finished) -> str:
    sampler = run.trainer.episode_sampler
    with torch.no_grad():
        (episode,) = sampler.sample_episodes([run.trainer.questions[0]], numbers=[0], seed=1, temperature=0.0)
    return str(sampler.tokenizer.decode(episode.first.prompt))[:1]


def check_reset(bench: Any) -> None:
    """The optimizer's moments are gone at the first step of stage 2, which is step 3, and at no other."""
    trainer, left = make_pair(bench.home)[0].trainer, []
    kept = trainer.cfg
    for resets, step in ((False, 3), (True, 2), (True, 3)):
        trainer.cfg = kept.with_values({"score.reset_adam": resets}, "test")
        trainer.create_optimizer().state["moments"] = {"step": 1}
        trainer._reset_optimizer(step)
        left.append(len(trainer.optimizer.state))
    trainer.cfg = kept
    assert left == [1, 1, 0]


def check_betas(_: Any) -> None:
    found = [choose_kl_coefficients(stage, ScoreConfig(beta1=0.3, beta2=0.4)) for stage in (1, 2)]
    assert [(betas["t1"], betas["t2"]) for betas in found] == [(0.4, 0.3), (0.3, 0.3)]


OF_SCORE: dict[str, Check] = {
    "episodes_per_problem": seen(lambda run: run.trainer.train_dataset.repeats, 4, 2),
    "stage2_steps": seen(lambda run: run.trainer.args.max_steps, 4, 7),
    "reset_adam": check_reset,
    "alpha": changes_advantages("alpha", 3.0),
    "turn_discount": changes_advantages("turn_discount", 0.05),
    "beta1": check_betas,
    "beta2": check_betas,
    "beta_guide": changes_gradient("beta_guide", 0.0, 1.0),
    "kl": changes_gradient("kl", "full", "k3"),
    "value": seen(lambda run: type(run.trainer.role_models.model.value_head), ValueHead, SeparateValue),
    "guide_reward": changes_advantages("guide_reward", "progress"),
    "leak_penalty": changes_advantages("leak_penalty", 0.5),
    "format_reward": changes_advantages("format_reward", 0.1),
    "value_coef": changes_advantages("value_coef", 0.5),
    "advantage": changes_advantages("advantage", "value", advantage="batch"),
    "scale": changes_advantages("scale", "batch"),
    "temperature": seen(log_prob_temperature, 1.0, 0.5),
    "max_new_tokens": seen(lambda run: run.cfg.prompt_tokens, 28, 25),
    "max_hint_tokens": seen(lambda run: run.cfg.prompt_tokens, 28, 25),
    "solver_learning_rate": seen(rate(0), 0.01, 0.5),
    "guide_learning_rate": seen(rate(1), 0.002, 0.25),
    "value_learning_rate": seen(rate(2), 1e-4, 0.125),
    "critic.learning_rate": seen(rate(3), None, 0.75),
    "critic.tau": seen(share_taken_over, None, 0.5),
    "critic.width": seen(critic_width, None, 12),
    "prompts.solve": seen(first_prompt, "0", "3"),
    "prompts.static_hint": seen(decode_hint("static"), "0", "3"),
    "prompts.right_hint": seen(decode_hint("right"), "0", "40"),
}
