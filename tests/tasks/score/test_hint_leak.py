"""Hints that state the answer, and answers that are cut off: scores and rewards of handwritten episodes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from score_run import score_options
from small_run import Inputs, write_small_run

from sftplay.config.load import load_config
from sftplay.data.questions import Question
from sftplay.heartbeat import Heartbeat
from sftplay.model.toys import ID, DigitsRecipe, make_digits
from sftplay.tasks.score.episode_rewards import EpisodeResult, RewardScorer, describe
from sftplay.tasks.score.losses import EpisodeRewards, compute_advantages
from sftplay.tasks.score.sample_episodes import Action, Episode
from sftplay.tasks.score.section import ScoreConfig

N = 8
PENALTY = 0.3


def action(text: str) -> Action:
    return Action(prompt=[ID["0"]], ids=[ID[text], ID["<end>"]], log_probs=[], is_truncated=False)


def episode(row: int, *, leaks: bool) -> Episode:
    """The first answer is wrong, the second one right; the hint is the answer, or another digit."""
    answer = row % 5
    wrong, right = (str((answer + by) % 5) for by in (1, 0))
    hint = action(right if leaks else wrong)
    question = Question(row, [], f"{row % 3}+{row}=", {"answer": right})
    return Episode(
        question=question, first=action(wrong), hint=hint, hint_ids=hint.ids_without_end, second=action(right)
    )


@pytest.fixture(scope="module")
def reward_scorer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RewardScorer]:
    from transformers import AutoTokenizer

    home = tmp_path_factory.mktemp("leaks")
    make_digits(home / "model", DigitsRecipe(steps=1), say=print)
    (home / "rows.jsonl").write_text('{"text": "1+1=", "answer": "2"}\n')
    inputs = Inputs(home / "model", home / "rows.jsonl", home / "rows.jsonl")
    cfg = load_config(write_small_run(home, inputs, **score_options()))
    with RewardScorer(cfg, columns=["answer"], tokenizer=AutoTokenizer.from_pretrained(inputs.model)) as reward_scorer:
        yield reward_scorer


@pytest.fixture(scope="module")
def results(reward_scorer: RewardScorer) -> dict[str, list[EpisodeResult]]:
    """Those on guides that leak always, never, and in half of their hints."""
    guides = {"always": [True] * N, "never": [False] * N, "half": [True, False] * (N // 2)}
    return {
        name: reward_scorer.score([episode(row, leaks=each) for row, each in enumerate(leaks)], heartbeat=Heartbeat())
        for name, leaks in guides.items()
    }


@pytest.mark.parametrize(("guide", "share"), [("always", 1.0), ("never", 0.0), ("half", 0.5)])
def test_leaks_are_counted_and_each_takes_the_penalty_off_the_guides_return(guide, share, results):
    episodes = results[guide]
    said = describe(episodes)
    assert said["hint_leak"] == share
    assert (said["acc_t1"], said["acc_t2"], said["i2c"]) == (0, 1, 1)
    columns = {name: torch.tensor([float(getattr(each, name)) for each in episodes]) for name in ("first", "second")}
    rewards = EpisodeRewards(
        **columns, is_known=torch.ones(N), form_first=torch.ones(N), form_second=torch.ones(N),
        leak=torch.tensor([float(each.leak) for each in episodes]), value=None,
    )  # fmt: skip
    for penalty in (0.0, PENALTY):
        score = ScoreConfig(leak_penalty=penalty, scale="none", advantage="batch")
        advantages = compute_advantages(rewards, score, stage=1)
        assert advantages.figures["return_guide"] == pytest.approx(1 - penalty * share)
        # A hint that leaks is worth the penalty less than one that does not.
        expected = [penalty * (share - each.leak) for each in episodes]
        assert advantages.guide.tolist() == pytest.approx(expected, abs=1e-6)
        assert advantages.second.tolist() == pytest.approx([0] * N)


def test_a_right_answer_that_was_cut_off_is_worth_nothing_and_is_counted(reward_scorer: RewardScorer):
    whole = episode(0, leaks=False)
    cut = whole._replace(second=whole.second._replace(ids=whole.second.ids_without_end, is_truncated=True))
    results = reward_scorer.score([whole, cut], heartbeat=Heartbeat())
    assert [(result.second, result.right[1], result.n_cut) for result in results] == [(1, True, 0), (0, False, 1)]
    said = describe(results)
    assert (said["acc_t2"], said["reward_t2"], said["i2c"]) == (0.5, 0.5, 0.5)
    assert said["truncated"] == 0.25  # one of four answers
