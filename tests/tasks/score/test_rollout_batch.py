"""A rollout batch that feeds several optimizer steps: minibatches, ratios, and what a checkpoint keeps of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sftplay.data.load_prompts import Question
from sftplay.errors import RunError
from sftplay.heartbeat import Heartbeat
from sftplay.model.builtin import ID
from sftplay.tasks.score.evaluation import EpisodeResult
from sftplay.tasks.score.role_models import RoleModels
from sftplay.tasks.score.sample_episodes import Action, Episode
from sftplay.tasks.score.section import ScoreConfig
from sftplay.tasks.score.trainer import (
    EPISODES_FILE,
    MinibatchSchedule,
    RolloutBatch,
    load_rollout_batch,
    save_rollout_batch,
)
from sftplay.tasks.score.update import (
    ActionBatch,
    Advantages,
    MinibatchSetup,
    PolicyUpdate,
    ScoredEpisodes,
    score_actions,
)

N = 4
END = ID["<end>"]


def find_step_places(schedule: MinibatchSchedule, step: int) -> list[int]:
    """Places of the episodes of a step, counted from 0."""
    rows = range(step * schedule.step_episodes, (step + 1) * schedule.step_episodes)
    return [schedule.find_place(row) for row in rows]


@pytest.mark.parametrize(("parts", "passes"), [(1, 3), (2, 2), (4, 1), (3, 2)])
def test_the_minibatches_of_a_pass_have_every_episode_of_the_rollout_batch_once(parts: int, passes: int):
    schedule = MinibatchSchedule(step_episodes=8, minibatches=parts, passes=passes, seed=7)
    parts_of_steps = {tuple(sorted(find_step_places(schedule, step))) for step in range(schedule.steps)}
    assert len(parts_of_steps) == (parts * passes if parts > 1 else 1)  # each pass cuts them otherwise
    for batch in range(2):
        every = list(range(batch * schedule.episodes, (batch + 1) * schedule.episodes))
        for number in range(passes):
            first = batch * schedule.steps + number * parts
            learned = [place for step in range(first, first + parts) for place in find_step_places(schedule, step)]
            assert sorted(learned) == every


@pytest.fixture(scope="module")
def role_models(two_adapters: Callable[[], RoleModels]) -> RoleModels:
    return two_adapters()


def sample_action(role_models: RoleModels, role: str, prompt: str, said: str) -> Action:
    """Create an action with the log-probabilities of the current model."""
    ids = [*(ID[character] for character in said), END]
    action = Action(prompt=[ID[c] for c in prompt], ids=ids, log_probs=[0.0] * len(ids), is_truncated=False)
    with torch.no_grad():
        batch = ActionBatch.from_actions([action], pad=ID["<pad>"], device="cpu")
        scores = score_actions(role_models, batch, role=role, temperature=1.0, kl="full")
    return action._replace(log_probs=scores.log_probs[0].tolist())


@pytest.fixture(scope="module")
def rollout_batch(role_models: RoleModels) -> RolloutBatch:
    """Four episodes whose actions are not equally long, and advantages of both signs."""
    said = (("1+3=", "4", "3", "4"), ("0+0=", "01", "0", "0"), ("4+4=", "2", "12", "333"), ("2+2=", "4", "4", "1"))
    episodes = [
        Episode(
            question=Question(n, [], problem, {"answer": "4"}),
            first=sample_action(role_models, "solver", problem, first),
            hint=(written := sample_action(role_models, "guide", f"{problem}{first}?", hint)),
            hint_ids=written.ids_without_end,
            second=sample_action(role_models, "solver", f"{problem}{first}?{hint}>", second),
        )
        for n, (problem, first, hint, second) in enumerate(said)
    ]
    result = EpisodeResult(
        first=0.0, second=1.0, is_known=True, form_first=False, form_second=False, is_parsed=False, leak=False,
        n_cut=0, hint_tokens=1, edit_ratio=0.1, is_identical=False,
    )  # fmt: skip
    results = [replace(result, second=float(n % 2)) for n in range(N)]
    advantages = torch.tensor([[1.3, -0.7, 0.1, -0.9], [0.3, 0.7, -1.1, 0.2], [-0.6, 0.6, 0.1, 0.8]])
    advantages = Advantages(*advantages, {"return_t1": 0.1, "none": None}, (advantages[0], advantages[1]))
    resampled = [(episode.first, episode.second) for episode in episodes]
    return RolloutBatch(3, ScoredEpisodes(episodes, results, resampled), advantages)


def policy_update(
    role_models: RoleModels,
    rollout_batch: RolloutBatch,
    part: list[int],
    *,
    is_on_policy: bool = True,
    **changes: float,
) -> PolicyUpdate:
    parts = N // len(part)
    score = ScoreConfig(
        max_new_tokens=4, max_hint_tokens=3, beta1=0.1, beta_guide=0.1, stage1_steps=0, steps_per_generation=parts,
        **changes,
    )  # fmt: skip
    batch = MinibatchSetup(
        micro_batch=2, n_episodes=N / parts, pad=ID["<pad>"], backward=lambda loss: loss.backward(),
        context=nullcontext, is_on_policy=is_on_policy,
    )  # fmt: skip
    return PolicyUpdate(
        rollout_batch.scored,
        part=part,
        role_models=role_models,
        score=score,
        batch=batch,
        heartbeat=Heartbeat(),
        step=1,
    )


def learned(
    role_models: RoleModels, rollout_batch: RolloutBatch, part: list[int], **given: float
) -> tuple[torch.Tensor, dict[str, float]]:
    """The gradient of everything that trains, and the figures of the step."""
    step = policy_update(role_models, rollout_batch, part, **given)
    step.learn(rollout_batch.advantages)
    gradient = torch.cat(
        [p.grad.flatten() for each in role_models.trainable.values() for p in each if p.grad is not None]
    )
    role_models.model.zero_grad()
    return gradient, step.figures()


@pytest.mark.parametrize("is_on_policy", [True, False])
def test_the_gradients_of_the_minibatches_of_a_pass_add_up_to_that_of_the_whole_rollout_batch(
    is_on_policy: bool, role_models: RoleModels, rollout_batch: RolloutBatch
):
    whole, _ = learned(role_models, rollout_batch, [0, 1, 2, 3])
    assert whole.norm() > 1e-3
    parts = [learned(role_models, rollout_batch, part, is_on_policy=is_on_policy)[0] for part in ([2, 0], [1, 3])]
    # Each is a mean over half of the episodes, with the KL's tokens counted as a half of all.
    torch.testing.assert_close(sum(parts) / 2, whole, atol=2e-6, rtol=1e-4)
    one, four = learned(role_models, rollout_batch, [0])[0], learned(role_models, rollout_batch, [0, 1, 2, 3])[0]
    assert not torch.allclose(one, four, rtol=0.1)


def test_a_model_that_has_moved_has_other_ratios_and_large_ones_are_clipped(
    role_models: RoleModels, rollout_batch: RolloutBatch
):
    actions = [episode.first for episode in rollout_batch.scored.episodes]
    before = torch.cat([torch.tensor(action.log_probs) for action in actions])
    kept = [parameter.detach().clone() for parameter in role_models.trainable["solver"]]
    for parameter in role_models.trainable["solver"]:
        parameter.data.mul_(1.5)
    moved = [sample_action(role_models, "solver", *_texts(action)) for action in actions]
    gradient, figures = learned(
        role_models, rollout_batch, [0, 1, 2, 3], is_on_policy=False, num_iterations=2, epsilon=0.01
    )
    free, _ = learned(role_models, rollout_batch, [0, 1, 2, 3], is_on_policy=False, num_iterations=2, epsilon=1e3)
    for parameter, weights in zip(role_models.trainable["solver"], kept, strict=True):
        parameter.data.copy_(weights)
    ratios = (torch.cat([torch.tensor(action.log_probs) for action in moved]) - before).exp()
    assert figures["ratio_t1"] == pytest.approx(ratios.mean().item(), rel=1e-5)
    assert figures["ratio_guide"] == pytest.approx(1.0, abs=1e-6)
    gains = torch.cat([rollout_batch.advantages.first[n].expand(len(action.ids)) for n, action in enumerate(actions)])
    is_clipped = ((ratios > 1.01) & (gains > 0)) | ((ratios < 0.99) & (gains < 0))
    assert is_clipped.any()
    assert figures["clip_share_t1"] == pytest.approx(is_clipped.float().mean().item(), rel=1e-5)
    assert not torch.allclose(gradient, free)


def _texts(action: Action) -> tuple[str, str]:
    letters = {number: character for character, number in ID.items()}
    return "".join(letters[n] for n in action.prompt), "".join(letters[n] for n in action.ids_without_end)


def test_v_learns_beside_a_guide_that_does_not_whatever_its_coefficient(
    role_models: RoleModels, rollout_batch: RolloutBatch
):
    gradients = []
    for value_coef in (0.0, 0.5):
        waiting = {"guidance_warmup": 9, "value_flow": "stop", "value_coef": value_coef}
        policy_update(role_models, rollout_batch, [0, 1, 2, 3], **waiting).learn(rollout_batch.advantages)
        assert all(parameter.grad is None for parameter in role_models.trainable["guide"])
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in role_models.trainable["value"]]))
        role_models.model.zero_grad()
    assert gradients[0].norm() > 1e-3
    torch.testing.assert_close(*gradients)


def test_a_checkpoint_inside_a_rollout_batch_without_its_episodes_is_refused_by_name(
    rollout_batch: RolloutBatch, tmp_path: Path
):
    with pytest.raises(RunError, match="the episodes of its rollout batch cannot be read") as refused:
        load_rollout_batch(tmp_path, questions=[])
    assert refused.value.where == str(tmp_path / EPISODES_FILE)
    save_rollout_batch(rollout_batch, tmp_path)
    kept = json.loads((tmp_path / EPISODES_FILE).read_text())
    (tmp_path / EPISODES_FILE).write_text(json.dumps({**kept, "episodes": []}))
    with pytest.raises(RunError, match="cannot be read"):
        load_rollout_batch(tmp_path, questions=[rollout_batch.scored.episodes[0].question])
