"""A drawing that feeds several optimizer steps: how its episodes are dealt, learned from by ratios, and kept."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from sftplay.config.schema.score import ScoreConfig
from sftplay.data.prompts.questions import Question
from sftplay.errors import RunError
from sftplay.heartbeat import Heartbeat
from sftplay.model.toys.tasks import ID, DigitsRecipe, make_digits
from sftplay.tasks.score import rollout_batch as kept_episodes
from sftplay.tasks.score.advantages import Advantages
from sftplay.tasks.score.episode_rewards import Verdict
from sftplay.tasks.score.problems import EpisodeRows, MinibatchSchedule, StepRows
from sftplay.tasks.score.role_models import Cast
from sftplay.tasks.score.rollout_batch import Drawing, load_drawing, save_drawing
from sftplay.tasks.score.sample_episodes import Action, Episode
from sftplay.tasks.score.scoring import ActionBatch, score_actions
from sftplay.tasks.score.update import Batch, Played, PolicyUpdate

N = 4
END = ID["<end>"]


def of_step(dealing: MinibatchSchedule, step: int) -> list[int]:
    """Places of the episodes of a step, counted from 0."""
    rows = range(step * dealing.step_episodes, (step + 1) * dealing.step_episodes)
    return [dealing.place(row) for row in rows]


@pytest.mark.parametrize(("parts", "passes"), [(1, 3), (2, 2), (4, 1), (3, 2)])
def test_the_steps_of_a_pass_have_every_episode_of_the_drawing_once(parts: int, passes: int):
    dealing = MinibatchSchedule(step_episodes=8, portions=parts, passes=passes, seed=7)
    for drawing in range(2):
        every = list(range(drawing * dealing.episodes, (drawing + 1) * dealing.episodes))
        for number in range(passes):
            first = drawing * dealing.steps + number * parts
            learned = [place for step in range(first, first + parts) for place in of_step(dealing, step)]
            assert sorted(learned) == every


def test_each_pass_deals_the_episodes_in_another_way():
    dealing = MinibatchSchedule(step_episodes=8, portions=2, passes=2, seed=7)
    steps = [sorted(of_step(dealing, step)) for step in range(4)]
    assert len({tuple(step) for step in steps}) == 4
    other = MinibatchSchedule(step_episodes=8, portions=2, passes=2, seed=8)
    assert [sorted(of_step(other, step)) for step in range(4)] != steps


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_rank_learns_from_episodes_that_it_has_played_itself(world: int):
    dealing = MinibatchSchedule(step_episodes=8, portions=2, passes=2)
    share = dealing.step_episodes // world  # accelerate gives rank 0 the first rows of a step, then rank 1
    played: list[int] = []
    for rank in range(world):
        with patch.multiple("sftplay.log", rank=lambda rank=rank: rank, world_size=lambda: world):
            own = dealing.own(1)
        for first in (0, 2):
            steps = [of_step(dealing, dealing.steps + first + n)[rank * share : (rank + 1) * share] for n in (0, 1)]
            assert sorted(place for step in steps for place in step) == list(own)
        played += own
    assert played == list(range(dealing.episodes, 2 * dealing.episodes))


def test_with_one_step_a_drawing_the_episodes_stand_in_their_order():
    rows = StepRows(EpisodeRows([5, 9], each=2), dealing=MinibatchSchedule(step_episodes=2), steps=2)
    assert [rows[n] for n in range(len(rows))] == [
        {"place": 0, "row": 5}, {"place": 1, "row": 5}, {"place": 2, "row": 9}, {"place": 3, "row": 9},
    ]  # fmt: skip
    with pytest.raises(IndexError):
        rows[4]


@pytest.fixture(scope="module")
def cast(tmp_path_factory: pytest.TempPathFactory) -> Cast:
    folder = tmp_path_factory.mktemp("digits") / "model"
    make_digits(folder, DigitsRecipe(steps=3), say=print)
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(folder)
    model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    cast = Cast(model, has_guide=True, guide_learns=True, has_value=True)
    for role in ("solver", "guide"):
        for parameter in cast.parts[role]:
            parameter.data.normal_(0, 0.05)
    return cast


def drawn(cast: Cast, role: str, prompt: str, said: str) -> Action:
    """An action with the log-probabilities that the model gives its tokens now."""
    ids = [*(ID[character] for character in said), END]
    action = Action(prompt=[ID[c] for c in prompt], ids=ids, log_probs=[0.0] * len(ids), is_truncated=False)
    with torch.no_grad():
        batch = ActionBatch.of([action], pad=ID["<pad>"], device="cpu")
        scores = score_actions(cast, batch, role=role, temperature=1.0, kl="full")
    return action._replace(log_probs=scores.log_probs[0].tolist())


@pytest.fixture(scope="module")
def drawing(cast: Cast) -> Drawing:
    """Four episodes whose actions are not equally long, and advantages of both signs."""
    said = (("1+3=", "4", "3", "4"), ("0+0=", "01", "0", "0"), ("4+4=", "2", "12", "333"), ("2+2=", "4", "4", "1"))
    episodes = [
        Episode(
            question=Question(n, [], problem, {"answer": "4"}),
            first=drawn(cast, "solver", problem, first),
            hint=(written := drawn(cast, "guide", f"{problem}{first}?", hint)),
            hint_ids=written.said,
            second=drawn(cast, "solver", f"{problem}{first}?{hint}>", second),
        )
        for n, (problem, first, hint, second) in enumerate(said)
    ]
    verdict = Verdict(
        first=0.0, second=1.0, is_known=True, form_first=False, form_second=False, is_parsed=False, leaks=False,
        n_cut=0, hint_tokens=1, edit_ratio=0.1, is_identical=False,
    )  # fmt: skip
    verdicts = [replace(verdict, second=float(n % 2)) for n in range(N)]
    advantages = torch.tensor([[1.3, -0.7, 0.1, -0.9], [0.3, 0.7, -1.1, 0.2], [-0.6, 0.6, 0.1, 0.8]])
    credit = Advantages(*advantages, {"return_t1": 0.1, "none": None}, (advantages[0], advantages[1]))
    fresh = [(episode.first, episode.second) for episode in episodes]
    return Drawing(3, Played(episodes, verdicts, fresh), credit)


def policy_update(
    cast: Cast, drawing: Drawing, part: list[int], *, is_fresh: bool = True, **changes: float
) -> PolicyUpdate:
    parts = N // len(part)
    score = ScoreConfig(
        max_new_tokens=4, max_hint_tokens=3, beta1=0.1, beta_guide=0.1, stage1_steps=0, steps_per_generation=parts,
        **changes,
    )  # fmt: skip
    batch = Batch(
        micro_batch=2, n_episodes=N / parts, pad=ID["<pad>"], backward=lambda loss: loss.backward(),
        context=nullcontext, is_fresh=is_fresh,
    )  # fmt: skip
    return PolicyUpdate(drawing.played, part=part, cast=cast, score=score, batch=batch, heartbeat=Heartbeat(), step=1)


def learned(cast: Cast, drawing: Drawing, part: list[int], **given: float) -> tuple[torch.Tensor, dict[str, float]]:
    """The gradient of everything that trains, and the figures of the step."""
    step = policy_update(cast, drawing, part, **given)
    step.learn(drawing.credit)
    gradient = torch.cat([p.grad.flatten() for each in cast.parts.values() for p in each if p.grad is not None])
    cast.model.zero_grad()
    return gradient, step.figures()


@pytest.mark.parametrize("is_fresh", [True, False])
def test_the_gradients_of_the_steps_of_a_pass_add_up_to_that_of_the_whole_drawing(
    is_fresh: bool, cast: Cast, drawing: Drawing
):
    whole, _ = learned(cast, drawing, [0, 1, 2, 3])
    assert whole.norm() > 1e-3
    parts = [learned(cast, drawing, part, is_fresh=is_fresh)[0] for part in ([2, 0], [1, 3])]
    # Each is a mean over half of the episodes, with the KL's tokens counted as a half of all.
    torch.testing.assert_close(sum(parts) / 2, whole, atol=2e-6, rtol=1e-4)
    one, four = learned(cast, drawing, [0])[0], learned(cast, drawing, [0, 1, 2, 3])[0]
    assert not torch.allclose(one, four, rtol=0.1)


def test_the_ratio_is_exactly_1_and_nothing_is_cut_in_the_first_step_after_a_draw(cast: Cast, drawing: Drawing):
    _, figures = learned(cast, drawing, [0, 2])
    for role in ("t1", "t2", "guide"):
        assert figures[f"ratio_{role}"] == pytest.approx(1.0, abs=1e-12)
        assert figures[f"clip_share_{role}"] == 0.0


def test_a_model_that_has_moved_has_other_ratios_and_what_is_far_is_cut(cast: Cast, drawing: Drawing):
    actions = [episode.first for episode in drawing.played.episodes]
    before = torch.cat([torch.tensor(action.log_probs) for action in actions])
    kept = [parameter.detach().clone() for parameter in cast.parts["solver"]]
    for parameter in cast.parts["solver"]:
        parameter.data.mul_(1.5)
    moved = [drawn(cast, "solver", *_texts(action)) for action in actions]
    gradient, figures = learned(cast, drawing, [0, 1, 2, 3], is_fresh=False, num_iterations=2, epsilon=0.01)
    free, _ = learned(cast, drawing, [0, 1, 2, 3], is_fresh=False, num_iterations=2, epsilon=1e3)
    for parameter, weights in zip(cast.parts["solver"], kept, strict=True):
        parameter.data.copy_(weights)
    ratios = (torch.cat([torch.tensor(action.log_probs) for action in moved]) - before).exp()
    assert figures["ratio_t1"] == pytest.approx(ratios.mean().item(), rel=1e-5)
    assert figures["ratio_guide"] == pytest.approx(1.0, abs=1e-6)
    gains = torch.cat([drawing.credit.first[n].expand(len(action.ids)) for n, action in enumerate(actions)])
    is_cut = ((ratios > 1.01) & (gains > 0)) | ((ratios < 0.99) & (gains < 0))
    assert is_cut.any()
    assert figures["clip_share_t1"] == pytest.approx(is_cut.float().mean().item(), rel=1e-5)
    assert not torch.allclose(gradient, free)


def _texts(action: Action) -> tuple[str, str]:
    letters = {number: character for character, number in ID.items()}
    return "".join(letters[n] for n in action.prompt), "".join(letters[n] for n in action.said)


def test_one_drawing_for_one_step_has_no_ratios(cast: Cast, drawing: Drawing):
    _, figures = learned(cast, drawing, [0, 1, 2, 3])
    assert not any(name.startswith(("ratio", "clip")) for name in figures)


def test_v_learns_beside_a_guide_that_does_not_whatever_its_coefficient(cast: Cast, drawing: Drawing):
    gradients = []
    for value_coef in (0.0, 0.5):
        waiting = {"guidance_warmup": 9, "value_flow": "stop", "value_coef": value_coef}
        policy_update(cast, drawing, [0, 1, 2, 3], **waiting).learn(drawing.credit)
        assert all(parameter.grad is None for parameter in cast.parts["guide"])
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in cast.parts["value"]]))
        cast.model.zero_grad()
    assert gradients[0].norm() > 1e-3
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("world", [1, 2])
def test_a_kept_drawing_comes_back_as_it_was_on_any_number_of_processes(world: int, drawing: Drawing, tmp_path: Path):
    save_drawing(drawing, tmp_path)
    share = N // world
    for rank in range(world):
        own = slice(rank * share, (rank + 1) * share)
        questions = [episode.question for episode in drawing.played.episodes[own]]
        with patch.multiple("sftplay.log", rank=lambda rank=rank: rank, world_size=lambda: world):
            back = load_drawing(tmp_path, questions=questions)
        assert back.number == drawing.number
        assert back.played.episodes == drawing.played.episodes[own]
        assert back.played.fresh == drawing.played.fresh[own]
        assert back.played.verdicts == drawing.played.verdicts
        assert back.credit.figures == drawing.credit.figures
        for mine, its in zip(back.credit[:3] + back.credit.paid, drawing.credit[:3] + drawing.credit.paid, strict=True):
            assert torch.equal(mine, its)


def test_a_checkpoint_inside_a_drawing_without_its_episodes_is_refused_by_name(drawing: Drawing, tmp_path: Path):
    with pytest.raises(RunError, match="the episodes of its drawing cannot be read") as refused:
        load_drawing(tmp_path, questions=[])
    assert refused.value.where == str(tmp_path / kept_episodes.FILE)
    save_drawing(drawing, tmp_path)
    kept = json.loads((tmp_path / kept_episodes.FILE).read_text())
    (tmp_path / kept_episodes.FILE).write_text(json.dumps({**kept, "episodes": []}))
    with pytest.raises(RunError, match="cannot be read"):
        load_drawing(tmp_path, questions=[drawing.played.episodes[0].question])
