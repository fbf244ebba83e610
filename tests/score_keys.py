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

from sftplay.config.rules.resume_keys import differences, values_that_decide_weights
from sftplay.config.rules.score import broken_score_rules, idle_score_keys
from sftplay.config.schema.score import ScoreConfig
from sftplay.errors import ConfigError
from sftplay.plan.devices.layout import layout_of
from sftplay.tasks.score.advantages import Outcome, credit_of
from sftplay.tasks.score.evaluation import EvaluateEpisodes
from sftplay.tasks.score.losses import kl_coefficients, stage_of
from sftplay.tasks.score.problems import MinibatchSchedule
from sftplay.tasks.score.update import Batch, Update, guide_learns
from sftplay.tasks.score.value_model import SeparateValue, ValueHead

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

OUTCOME = Outcome(
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
    run.trainer.judge.rewards.close()
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


def credits(key: str, value: Any) -> Check:
    """The key changes the advantages of stage 2, or the returns that they are made of."""

    def check(_: Any) -> None:
        usual = {"scale": "none", "advantage": "rloo", "episodes_per_problem": 2}
        if key == "advantage":
            usual = {"scale": "none", "episodes_per_problem": 2, "advantage": "batch"}
        before, after = (credit_of(OUTCOME, ScoreConfig(**each), stage=2) for each in (usual, {**usual, key: value}))
        pairs = zip(before[:3], after[:3], strict=True)
        assert any(not torch.equal(mine, its) for mine, its in pairs if mine is not None and its is not None)

    return check


def refuses(key: str, value: Any, *, what: str = "not part of this version") -> Check:
    """A value that is not built yet, or contradicts the others, is refused by its key."""

    def check(bench: Any) -> None:
        cfg = _pair(bench.home)[0].cfg.with_values({f"score.{key}": value}, "test")
        assert any(f"score.{key}" in each.keys and what in each.what for each in broken_score_rules(cfg))

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
        assert f"score.critic.{key}" in [name for name, *_ in idle_score_keys(_pair(bench.home)[0].cfg)]
        assert look(_critic(bench.home)) == seen

    return check


def check_separate(bench: Any) -> None:
    """A network of its own, which no gradient joins with the guide: any other flow is refused."""
    refuses("value", "separate", what="no gradient of V reaches the guide")(bench)
    assert isinstance(_critic(bench.home).trainer.cast.model.value_head, SeparateValue)
    assert isinstance(_pair(bench.home)[0].trainer.cast.model.value_head, ValueHead)


def share_taken_over(run: Finished) -> float:
    """How far the slow copy follows one step of the critic."""
    cast, optimizer = run.trainer.cast, run.trainer.create_optimizer()
    its, slow = next(cast.critic.parameters()), next(cast.slow_critic.parameters())
    its.grad = torch.ones_like(its)
    before = slow.clone()
    optimizer.step()
    optimizer.zero_grad()
    return round(float(((slow - before) / (its.detach() - before)).mean()), 4)


def episodes(run: Finished) -> Any:
    trainer = run.trainer
    questions = [trainer.questions[0]] * 4
    with torch.no_grad():
        return trainer.player.play(questions, numbers=range(4), seed=1, temperature=run.cfg.score.temperature)


def sizes_of_draws(run: Finished) -> list[int]:
    found: list[int] = []
    run.trainer.player._at_once = None
    with patch.object(
        type(run.trainer.player.cast.model.get_base_model()),
        "generate",
        side_effect=lambda **given: _stop(given, found),
    ):
        with suppress(Enough):
            episodes(run)
    run.trainer.player._at_once = None
    return found


def _stop(given: dict[str, Any], found: list[int]) -> None:
    found.append(len(given["input_ids"]))
    raise Enough


def log_prob(run: Finished) -> float:
    """Of the first token of the first episode, over what temperature 1 gives."""
    action = episodes(run)[0].first
    with torch.no_grad(), run.trainer.cast.speaking("solver") as model:
        scores = model.eval()(torch.tensor([action.prompt])).logits[0, -1]
    both = [(scores / t).log_softmax(-1)[action.ids[0]].item() for t in (1.0, 0.5)]
    return min((abs(each - action.log_probs[0]), t) for each, t in zip(both, (1.0, 0.5), strict=True))[1]


def rates(run: Finished) -> list[float]:
    return [group["lr"] for group in run.trainer.create_optimizer().param_groups]


def texts(run: Finished) -> list[str]:
    episode = episodes(run)[0]
    decode = run.trainer.player.tokenizer.decode
    assert episode.hint is not None
    return [decode(each.prompt)[:1] for each in (episode.first, episode.hint, episode.second)]


def hint_of(kind: Any) -> Callable[[Finished], str]:
    def look(run: Finished) -> str:
        with torch.no_grad():
            player, question = run.trainer.player, run.trainer.questions[0]
            (episode,) = player.play([question], numbers=[0], seed=1, temperature=0.0, hints=kind)
        return str(player.tokenizer.decode(episode.hint_ids))

    return look


def check_guidance(bench: Any) -> None:
    inputs = score_inputs(bench.home / "score-guidance", steps=1)
    parts = {
        kind: set(made(bench.home / f"score-{kind}", inputs, score__guidance=kind).trainer.cast.parts)
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
    """Number and temperature of the episodes of an evaluation, as the player is asked for them."""
    asked = []
    for run in _pair(bench.home):
        found: dict[str, Any] = {}

        def play(questions: Any, *, found: dict[str, Any] = found, **given: Any) -> list[Any]:
            found.update(n=len(questions), temperature=given["temperature"])
            raise Enough

        callback = EvaluateEpisodes(run.cfg, [run.trainer.questions[0]] * 3, folder=bench.home, every=1)
        callback.attach(run.trainer)
        for is_greedy in (False, True):
            with patch.object(run.trainer.player, "play", play), suppress(Enough):
                callback._share("own", is_greedy=is_greedy)
            asked.append({**found})
    once = {"n": 3, "temperature": 0.0}
    assert asked == [once, once, {"n": 6, "temperature": 0.5}, once]


def dealt(score: ScoreConfig) -> MinibatchSchedule:
    """How a drawing of four episodes is dealt."""
    return MinibatchSchedule(step_episodes=4, portions=score.steps_per_generation, passes=score.num_iterations)


def check_update(key: str, *values: Any, **usual: Any) -> Check:
    """The key changes what the guide's or the solver's gradient is made of, beside other keys as in `usual`."""

    def check(bench: Any) -> None:
        run = _pair(bench.home)[0]
        played = episodes(run)
        gradients = []
        for value in values:
            score = run.cfg.score.model_copy(update={**usual, key: value})
            step = Update(run.trainer.cast, score, batch=_batch(run))
            for parameter in run.trainer.cast.parts["guide"]:
                parameter.data.add_(1e-2)
            actions = [each.hint for each in played if each.hint is not None]
            step.guide(actions, advantage=torch.ones(4), outcome=torch.ones(4), n_tokens=8)
            for parameter in run.trainer.cast.parts["guide"]:
                parameter.data.sub_(1e-2)
            gradients.append(
                torch.cat([p.grad.flatten() for p in run.trainer.cast.parts["guide"] if p.grad is not None])
            )
            run.trainer.cast.model.zero_grad()
        assert not torch.equal(*gradients)

    return check


def lies(part: str, device: str, *, refused: str = "") -> Check:
    """The part lies on this device of a machine with two GPUs, or is refused there."""

    def check(bench: Any) -> None:
        cfg = _pair(bench.home)[0].cfg.with_values({f"score.devices.{part}": device}, "test")
        with pytest.raises(ConfigError, match=refused) if refused else nullcontext():
            assert layout_of(cfg, placement="roles", gpus=2, processes=1).devices()[part] == device

    return check


def separates(bench: Any) -> None:
    inputs = score_inputs(bench.home / "score-roles", steps=1)
    run = built(bench.home / "score-placed", inputs, **score_options(score__placement="roles"))
    with run.trainer.judge:
        assert run.trainer.cast.is_separate
    assert not _pair(bench.home)[0].trainer.cast.is_separate


def _batch(run: Finished) -> Any:
    return Batch(
        micro_batch=4, n_episodes=4, pad=0, backward=lambda loss: loss.backward(), context=nullcontext,
        is_fresh=False,
    )  # fmt: skip


def check_reset(bench: Any) -> None:
    """The optimizer's moments are gone at the first step of stage 2, which is step 3, and at no other."""
    run = _pair(bench.home)[0]
    trainer, kept = run.trainer, run.trainer.cfg
    left = []
    for resets, step in ((False, 3), (True, 2), (True, 3)):
        trainer.cfg = kept.with_values({"score.reset_adam": resets}, "test")
        trainer.create_optimizer().state["moments"] = {"step": 1}
        trainer._forget_moments(step)
        left.append(len(trainer.optimizer.state))
    trainer.cfg = kept
    assert left == [1, 1, 0]


OF_SCORE: dict[str, Check] = {
    "episodes_per_problem": seen(lambda run: len(run.trainer.train_dataset.episodes.problems), 16, 32),
    "guidance": check_guidance,
    "guidance_warmup": seen(
        lambda run: [guide_learns(run.trainer.cast, run.cfg.score, step=step) for step in (1, 4)],
        [True, True],
        [False, True],
    ),
    "stage1_steps": passed_to("stage1_steps", lambda score: stage_of(150, score), 100, 200),
    "stage2_steps": passed_to("stage2_steps", lambda score: score.stage1_steps + score.stage2_steps, 1, 2),
    "reset_adam": check_reset,
    "kl1_max": free_to_change("kl1_max", 0.5),
    "alpha": credits("alpha", 3.0),
    "turn_discount": credits("turn_discount", 0.05),
    "beta1": passed_to("beta1", lambda score: kl_coefficients(2, score), 0.01, 0.02),
    "beta2": passed_to("beta2", lambda score: kl_coefficients(1, score), 0.1, 0.2),
    "beta_guide": check_update("beta_guide", 0.0, 1.0),
    "kl": check_update("kl", "full", "k3"),
    "guide_reward": credits("guide_reward", "signed"),
    "leak_penalty": credits("leak_penalty", 0.5),
    "format_reward": credits("format_reward", 0.1),
    "value_coef": credits("value_coef", 0.5),
    "value": check_separate,
    "value_flow": check_update("value_flow", "shared_trunk", "stop"),
    "advantage": credits("advantage", "value"),
    "scale": credits("scale", "batch"),
    "steps_per_generation": seen(lambda run: len(run.trainer.dealing.own(0)), 16, 32),
    "num_iterations": passed_to("num_iterations", lambda score: dealt(score).place(4), 1, 2),
    "epsilon": check_update("epsilon", 1e-4, 10.0, num_iterations=2),
    "temperature": seen(log_prob, 1.0, 0.5),
    "max_new_tokens": seen(lambda run: run.cfg.prompt_tokens, 28, 25),
    "max_hint_tokens": seen(lambda run: run.cfg.prompt_tokens, 28, 25),
    "generation_rows": seen(sizes_of_draws, [4], [2]),
    "solver_learning_rate": seen(lambda run: rates(run)[0], 0.01, 0.5),
    "guide_learning_rate": seen(lambda run: rates(run)[1], 0.002, 0.25),
    "value_learning_rate": seen(lambda run: rates(run)[2], 1e-4, 0.125),
    "min_hint_gain": free_to_change("min_hint_gain", 0.1),
    "eval_temperature": check_evaluation,
    "eval_samples": check_evaluation,
    "prompts.solve": seen(texts, ["0", "0", "0"], ["0", "1", "2"]),
    "prompts.guide": seen(texts, ["0", "0", "0"], ["0", "1", "2"]),
    "prompts.revise": seen(texts, ["0", "0", "0"], ["0", "1", "2"]),
    "prompts.static_hint": seen(hint_of("static"), "0", "3"),
    "prompts.right_hint": seen(hint_of("right"), "0", "40"),
    "placement": separates,
    "devices.solver": lies("solver", "cuda:1", refused="first visible GPU"),
    **{f"devices.{part}": lies(part, "cpu") for part in ("guide", "value", "critic", "target_critic", "ref")},
    "critic.learning_rate": of_critic("learning_rate", lambda run: rates(run)[3], 0.25),
    "critic.tau": of_critic("tau", share_taken_over, 0.5),
    "critic.width": of_critic("width", lambda run: run.trainer.cast.critic.encoder.recurrent.hidden_size, 12),
    "samples": free_to_change("samples", 4),
}
"""Key below `score` -> what it changes. Run-level effects (min_hint_gain refuses, samples are written) are in
tests/tasks/score."""
