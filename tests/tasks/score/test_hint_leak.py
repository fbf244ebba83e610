"""Hints that state the answer, and answers that are cut off: scores and rewards of handwritten episodes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from score_run import score_options
from small_run import Inputs, write_small_run

from sftplay.config.load import load_config
from sftplay.data.load_prompts import Question
from sftplay.heartbeat import Heartbeat
from sftplay.model.toys import ID, DigitsRecipe, make_digits
from sftplay.tasks.score.episode_rewards import RewardScorer, describe
from sftplay.tasks.score.sample_episodes import Action, Episode


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


def test_a_right_answer_that_was_cut_off_is_worth_nothing_and_is_counted(reward_scorer: RewardScorer):
    whole = episode(0, leaks=False)
    cut = whole._replace(second=whole.second._replace(ids=whole.second.ids_without_end, is_truncated=True))
    results = reward_scorer.score([whole, cut], heartbeat=Heartbeat())
    assert [(result.second, result.right[1], result.n_cut) for result in results] == [(1, True, 0), (0, False, 1)]
    said = describe(results)
    assert (said["acc_t2"], said["reward_t2"], said["i2c"]) == (0.5, 0.5, 0.5)
    assert said["truncated"] == 0.25  # one of four answers
