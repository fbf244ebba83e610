"""What each key of the section `score` changes, for the table of all keys."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from in_process import Finished, built
from score_run import PROMPTS, score_inputs, score_options
from small_run import Inputs

from sftplay.config.keys import differences, values_that_decide_weights
from sftplay.errors import ConfigError
from sftplay.tasks.score.evaluation import EvaluateEpisodes
from sftplay.tasks.score.losses import EpisodeRewards, choose_kl_coefficients, compute_advantages, find_stage
from sftplay.tasks.score.placement import resolve_layout
from sftplay.tasks.score.role_models import SeparateValue, ValueHead
from sftplay.tasks.score.rollout_batch import MinibatchSchedule
from sftplay.tasks.score.section import ScoreConfig
from sftplay.tasks.score.spec import SPEC
from sftplay.tasks.score.update import MinibatchSetup, PolicyGradients, is_guide_training

Check = Callable[[Any], None]


class Enough(Exception):
    """What was asked for has been seen."""


CHANGES = {
    "score__guidance_warmup": 3,
    "score__steps_per_generation": 2,
    "score__temperature": 0.5,
    "score__max_new_tokens": 4,
    "score__max_hint_tokens": 3,
    "score__generation_rows": 2,
    "score__solver_learning_rate": 0.5,
    "score__guide_learning_rate": 0.25,
    "score__value_learning_rate": 0.125,
    "score__eval_samples": 2,
    "score__eval_temperature": 0.5,
    "score__episodes_per_problem": 2,
    "score__prompts": {
        "solve": "0{problem}", "guide": "1{problem}{attempt}?", "revise": "2{problem}{attempt}?{hint}>",
        "static_hint": "3", "right_hint": "4{answer}",
    },
}  # fmt: skip

REWARDS = EpisodeRewards(
    first=torch.tensor([0.0, 1.0, 0.0, 1.0]),
    second=torch.tensor([1.0, 1.0, 0.0, 0.0]),
    is_known=torch.ones(4),
    form_first=torch.tensor([1.0, 0.0, 0.0, 0.0]),
    form_second=torch.tensor([0.0, 0.0, 0.0, 1.0]),
    leak=torch.tensor([1.0, 0.0, 0.0, 0.0]),
    value=torch.tensor([0.9, 0.8, 0.2, 0.1]),
)


def made(home: Path, inputs: Inputs, **changes: Any) -> Finished:
    """A run up to its first step. Its rewards are not asked: their processes would outlive the tests."""
    run = built(home, inputs, **score_options(**changes))
    run.trainer.reward_scorer.rewards.close()
    return run


@cache
def _pair(home: Path) -> tuple[Finished, Finished]:
    inputs = score_inputs(home / "score", steps=1)
    changes = ({"score__prompts": PROMPTS}, CHANGES)
    plain, changed = (made(home / f"score-{n}", inputs, **each) for n, each in enumerate(changes))
    return plain, changed


def seen(look: Callable[[Finished], Any], before: Any, after: Any) -> Check:
    """`look` sees these in a plain run of the task and in one in which many keys are changed."""

    def check(bench: Any) -> None:
        plain, changed = _pair(bench.home)
        assert look(plain) == before
        assert look(changed) == after

    return check


def changes_advantages(key: str, value: Any) -> Check:
    """The key changes the advantages of stage 2, or the returns that they are made of."""

    def check(_: Any) -> None:
        usual = {"scale": "none", "advantage": "rloo", "episodes_per_problem": 2}
        if key == "advantage":
            usual = {"scale": "none", "episodes_per_problem": 2, "advantage": "batch"}
        before, after = (
            compute_advantages(REWARDS, ScoreConfig(**each), stage=2) for each in (usual, {**usual, key: value})
        )
        pairs = zip(before[:3], after[:3], strict=True)
        assert any(not torch.equal(old, new) for old, new in pairs if old is not None and new is not None)

    return check


def refuses(key: str, value: Any, *, what: str = "not part of this version") -> Check:
    """A value that is not built yet, or contradicts the others, is refused by its key."""

    def check(bench: Any) -> None:
        cfg = _pair(bench.home)[0].cfg.with_values({f"score.{key}": value}, "test")
        assert any(f"score.{key}" in each.keys and what in each.what for each in SPEC.broken_rules(cfg))

    return check


@cache
def _critic(home: Path) -> Finished:
    inputs = score_inputs(home / "score-critic", steps=1)
    changes = {"score__advantage": "critic", "score__value": "separate", "score__value_flow": "stop"}
    keys = {"score__critic": {"learning_rate": 0.25, "tau": 0.5, "width": 12}}
    return made(home / "score-critic-run", inputs, **changes, **keys)


def of_critic(key: str, look: Callable[[Finished], Any], seen: Any) -> Check:
    """`look` sees this in a run with a critic; without one, the key is named as one without effect."""

    def check(bench: Any) -> None:
        assert f"score.critic.{key}" in [name for name, *_ in SPEC.idle_keys(_pair(bench.home)[0].cfg)]
        assert look(_critic(bench.home)) == seen

    return check


def check_separate(bench: Any) -> None:
    """A network of its own, which no gradient joins with the guide: any other flow is refused."""
    refuses("value", "separate", what="no gradient of V reaches the guide")(bench)
    assert isinstance(_critic(bench.home).trainer.role_models.model.value_head, SeparateValue)
    assert isinstance(_pair(bench.home)[0].trainer.role_models.model.value_head, ValueHead)


def share_taken_over(run: Finished) -> float:
    """How far the target critic follows one step of the critic."""
    role_models, optimizer = run.trainer.role_models, run.trainer.create_optimizer()
    online, target = next(role_models.critic.parameters()), next(role_models.target_critic.parameters())
    online.grad = torch.ones_like(online)
    before = target.clone()
    optimizer.step()
    optimizer.zero_grad()
    return round(float(((target - before) / (online.detach() - before)).mean()), 4)


def episodes(run: Finished) -> Any:
    trainer = run.trainer
    questions = [trainer.questions[0]] * 4
    with torch.no_grad():
        return trainer.episode_sampler.sample_episodes(
            questions, numbers=range(4), seed=1, temperature=run.cfg.score.temperature
        )


def find_batch_sizes(run: Finished) -> list[int]:
    found: list[int] = []
    run.trainer.episode_sampler._batches = None
    with patch.object(
        type(run.trainer.episode_sampler.role_models.model.get_base_model()),
        "generate",
        side_effect=lambda **given: _stop(given, found),
    ):
        with suppress(Enough):
            episodes(run)
    run.trainer.episode_sampler._batches = None
    return found


def _stop(given: dict[str, Any], found: list[int]) -> None:
    found.append(len(given["input_ids"]))
    raise Enough


def log_prob(run: Finished) -> float:
    """Of the first token of the first episode, over what temperature 1 gives."""
    action = episodes(run)[0].first
    with torch.no_grad(), run.trainer.role_models.use_role("solver") as model:
        scores = model.eval()(torch.tensor([action.prompt])).logits[0, -1]
    both = [(scores / t).log_softmax(-1)[action.ids[0]].item() for t in (1.0, 0.5)]
    return min((abs(each - action.log_probs[0]), t) for each, t in zip(both, (1.0, 0.5), strict=True))[1]


def rates(run: Finished) -> list[float]:
    return [group["lr"] for group in run.trainer.create_optimizer().param_groups]


def texts(run: Finished) -> list[str]:
    episode = episodes(run)[0]
    decode = run.trainer.episode_sampler.tokenizer.decode
    assert episode.hint is not None
    return [decode(each.prompt)[:1] for each in (episode.first, episode.hint, episode.second)]


def decode_hint(kind: Any) -> Callable[[Finished], str]:
    def look(run: Finished) -> str:
        with torch.no_grad():
            episode_sampler, question = run.trainer.episode_sampler, run.trainer.questions[0]
            (episode,) = episode_sampler.sample_episodes([question], numbers=[0], seed=1, temperature=0.0, hints=kind)
        return str(episode_sampler.tokenizer.decode(episode.hint_ids))

    return look


def check_guidance(bench: Any) -> None:
    inputs = score_inputs(bench.home / "score-guidance", steps=1)
    parts = {
        kind: set(made(bench.home / f"score-{kind}", inputs, score__guidance=kind).trainer.role_models.trainable)
        for kind in ("static", "model", "model_trained")
    }
    assert parts == {"static": {"solver"}, "model": {"solver", "value"}, "model_trained": {"solver", "guide", "value"}}


def free_to_change(key: str, value: Any) -> Check:
    def check(bench: Any) -> None:
        before = _pair(bench.home)[0].cfg
        after = before.with_values({f"score.{key}": value}, "test")
        assert after != before
        assert differences(values_that_decide_weights(before), values_that_decide_weights(after)) == []

    return check


def passed_to(key: str, look: Callable[[ScoreConfig], Any], *values: Any) -> Check:
    """`look` sees a difference between two values."""

    def check(_: Any) -> None:
        first, second = (look(ScoreConfig(**{key: value})) for value in values)
        assert first != second

    return check


def check_evaluation(bench: Any) -> None:
    """Number and temperature of the episodes of an evaluation, as the episode sampler gets them."""
    asked = []
    for run in _pair(bench.home):
        found: dict[str, Any] = {}

        def sample(questions: Any, *, found: dict[str, Any] = found, **given: Any) -> list[Any]:
            found.update(n=len(questions), temperature=given["temperature"])
            raise Enough

        callback = EvaluateEpisodes(run.cfg, [run.trainer.questions[0]] * 3, folder=bench.home, every=1)
        callback.attach(run.trainer)
        for is_greedy in (False, True):
            with patch.object(run.trainer.episode_sampler, "sample_episodes", sample), suppress(Enough):
                callback._sample("own", is_greedy=is_greedy)
            asked.append({**found})
    once = {"n": 3, "temperature": 0.0}
    assert asked == [once, once, {"n": 6, "temperature": 0.5}, once]


def make_schedule(score: ScoreConfig) -> MinibatchSchedule:
    """The schedule of a rollout batch with minibatches of four episodes."""
    return MinibatchSchedule(step_episodes=4, minibatches=score.steps_per_generation, passes=score.num_iterations)


def check_update(key: str, *values: Any, **usual: Any) -> Check:
    """The key changes what the guide's or the solver's gradient is made of, beside other keys as in `usual`."""

    def check(bench: Any) -> None:
        run = _pair(bench.home)[0]
        sampled = episodes(run)
        gradients = []
        for value in values:
            score = run.cfg.score.model_copy(update={**usual, key: value})
            step = PolicyGradients(run.trainer.role_models, score, batch=_batch(run))
            for parameter in run.trainer.role_models.trainable["guide"]:
                parameter.data.add_(1e-2)
            actions = [each.hint for each in sampled if each.hint is not None]
            step.learn(
                actions, "guide", beta=score.beta_guide, advantage=torch.ones(4), value_target=torch.ones(4), n_tokens=8
            )
            for parameter in run.trainer.role_models.trainable["guide"]:
                parameter.data.sub_(1e-2)
            gradients.append(
                torch.cat([p.grad.flatten() for p in run.trainer.role_models.trainable["guide"] if p.grad is not None])
            )
            run.trainer.role_models.model.zero_grad()
        assert not torch.equal(*gradients)

    return check


def lies(part: str, device: str, *, refused: str = "") -> Check:
    """The part lies on this device of a machine with two GPUs, or is refused there."""

    def check(bench: Any) -> None:
        cfg = _pair(bench.home)[0].cfg.with_values({f"score.devices.{part}": device}, "test")
        with pytest.raises(ConfigError, match=refused) if refused else nullcontext():
            assert resolve_layout(cfg, placement="roles", gpus=2, processes=1).devices()[part] == device

    return check


def separates(bench: Any) -> None:
    inputs = score_inputs(bench.home / "score-roles", steps=1)
    run = built(bench.home / "score-placed", inputs, **score_options(score__placement="roles"))
    with run.trainer.reward_scorer:
        assert run.trainer.role_models.is_separate
    assert not _pair(bench.home)[0].trainer.role_models.is_separate


def _batch(run: Finished) -> Any:
    return MinibatchSetup(
        micro_batch=4, n_episodes=4, pad=0, backward=lambda loss: loss.backward(), context=nullcontext,
        is_on_policy=False,
    )  # fmt: skip


def check_reset(bench: Any) -> None:
    """The optimizer's moments are gone at the first step of stage 2, which is step 3, and at no other."""
    run = _pair(bench.home)[0]
    trainer, kept = run.trainer, run.trainer.cfg
    left = []
    for resets, step in ((False, 3), (True, 2), (True, 3)):
        trainer.cfg = kept.with_values({"score.reset_adam": resets}, "test")
        trainer.create_optimizer().state["moments"] = {"step": 1}
        trainer._reset_optimizer(step)
        left.append(len(trainer.optimizer.state))
    trainer.cfg = kept
    assert left == [1, 1, 0]


OF_SCORE: dict[str, Check] = {
    "episodes_per_problem": seen(lambda run: len(run.trainer.train_dataset.problems), 16, 32),
    "guidance": check_guidance,
    "guidance_warmup": seen(
        lambda run: [is_guide_training(run.trainer.role_models, run.cfg.score, step=step) for step in (1, 4)],
        [True, True],
        [False, True],
    ),
    "stage1_steps": passed_to("stage1_steps", lambda score: find_stage(150, score), 100, 200),
    "stage2_steps": passed_to("stage2_steps", lambda score: score.stage1_steps + score.stage2_steps, 1, 2),
    "reset_adam": check_reset,
    "kl1_max": free_to_change("kl1_max", 0.5),
    "alpha": changes_advantages("alpha", 3.0),
    "turn_discount": changes_advantages("turn_discount", 0.05),
    "beta1": passed_to("beta1", lambda score: choose_kl_coefficients(2, score), 0.01, 0.02),
    "beta2": passed_to("beta2", lambda score: choose_kl_coefficients(1, score), 0.1, 0.2),
    "beta_guide": check_update("beta_guide", 0.0, 1.0),
    "kl": check_update("kl", "full", "k3"),
    "guide_reward": changes_advantages("guide_reward", "signed"),
    "leak_penalty": changes_advantages("leak_penalty", 0.5),
    "format_reward": changes_advantages("format_reward", 0.1),
    "value_coef": changes_advantages("value_coef", 0.5),
    "value": check_separate,
    "value_flow": check_update("value_flow", "shared_trunk", "stop"),
    "advantage": changes_advantages("advantage", "value"),
    "scale": changes_advantages("scale", "batch"),
    "steps_per_generation": seen(lambda run: len(run.trainer.schedule.rank_places(0)), 16, 32),
    "num_iterations": passed_to("num_iterations", lambda score: make_schedule(score).find_place(4), 1, 2),
    "epsilon": check_update("epsilon", 1e-4, 10.0, num_iterations=2),
    "temperature": seen(log_prob, 1.0, 0.5),
    "max_new_tokens": seen(lambda run: run.cfg.prompt_tokens, 28, 25),
    "max_hint_tokens": seen(lambda run: run.cfg.prompt_tokens, 28, 25),
    "generation_rows": seen(find_batch_sizes, [4], [2]),
    "solver_learning_rate": seen(lambda run: rates(run)[0], 0.01, 0.5),
    "guide_learning_rate": seen(lambda run: rates(run)[1], 0.002, 0.25),
    "value_learning_rate": seen(lambda run: rates(run)[2], 1e-4, 0.125),
    "min_hint_gain": free_to_change("min_hint_gain", 0.1),
    "eval_temperature": check_evaluation,
    "eval_samples": check_evaluation,
    "prompts.solve": seen(texts, ["0", "0", "0"], ["0", "1", "2"]),
    "prompts.guide": seen(texts, ["0", "0", "0"], ["0", "1", "2"]),
    "prompts.revise": seen(texts, ["0", "0", "0"], ["0", "1", "2"]),
    "prompts.static_hint": seen(decode_hint("static"), "0", "3"),
    "prompts.right_hint": seen(decode_hint("right"), "0", "40"),
    "placement": separates,
    "devices.solver": lies("solver", "cuda:1", refused="first visible GPU"),
    **{f"devices.{part}": lies(part, "cpu") for part in ("guide", "value", "critic", "target_critic", "ref")},
    "critic.learning_rate": of_critic("learning_rate", lambda run: rates(run)[3], 0.25),
    "critic.tau": of_critic("tau", share_taken_over, 0.5),
    "critic.width": of_critic("width", lambda run: run.trainer.role_models.critic.encoder.recurrent.hidden_size, 12),
    "samples": free_to_change("samples", 4),
}
"""Key below `score` -> what it changes. Run-level effects (min_hint_gain refuses, samples are written) are in
tests/tasks/score."""
