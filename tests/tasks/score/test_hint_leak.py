"""Hints that state the answer, and answers that are cut off: episodes written down here are judged and paid."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from score_run import score_options
from small_run import Inputs, write_small_run

from sftplay.config.load import load_config
from sftplay.config.schema.score import ScoreConfig
from sftplay.data.prompts.questions import Question
from sftplay.heartbeat import Heartbeat
from sftplay.model.toys.tasks import ID, DigitsRecipe, make_digits
from sftplay.tasks.score.advantages import Outcome, credit_of
from sftplay.tasks.score.episode_rewards import EpisodeJudge, Verdict, describe
from sftplay.tasks.score.sample_episodes import Action, Episode

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
    return Episode(question=question, first=action(wrong), hint=hint, hint_ids=hint.said, second=action(right))


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EpisodeJudge]:
    from transformers import AutoTokenizer

    home = tmp_path_factory.mktemp("leaks")
    make_digits(home / "model", DigitsRecipe(steps=1), say=print)
    (home / "rows.jsonl").write_text('{"text": "1+1=", "answer": "2"}\n')
    inputs = Inputs(home / "model", home / "rows.jsonl", home / "rows.jsonl")
    cfg = load_config(write_small_run(home, inputs, **score_options()))
    with EpisodeJudge(cfg, columns=["answer"], tokenizer=AutoTokenizer.from_pretrained(inputs.model)) as judge:
        yield judge


@pytest.fixture(scope="module")
def verdicts(judge: EpisodeJudge) -> dict[str, list[Verdict]]:
    """Those on guides that leak always, never, and in half of their hints."""
    guides = {"always": [True] * N, "never": [False] * N, "half": [True, False] * (N // 2)}
    return {
        name: judge.judge([episode(row, leaks=each) for row, each in enumerate(leaks)], heartbeat=Heartbeat())
        for name, leaks in guides.items()
    }


@pytest.mark.parametrize(("guide", "share"), [("always", 1.0), ("never", 0.0), ("half", 0.5)])
def test_leaks_are_counted_and_each_takes_the_penalty_off_the_guides_return(guide, share, verdicts):
    mine = verdicts[guide]
    said = describe(mine)
    assert said["hint_leak"] == share
    assert (said["acc_t1"], said["acc_t2"], said["i2c"]) == (0, 1, 1)
    columns = {name: torch.tensor([float(getattr(each, name)) for each in mine]) for name in ("first", "second")}
    outcome = Outcome(
        **columns, is_known=torch.ones(N), form_first=torch.ones(N), form_second=torch.ones(N),
        leak=torch.tensor([float(each.leaks) for each in mine]), value=None,
    )  # fmt: skip
    for penalty in (0.0, PENALTY):
        score = ScoreConfig(leak_penalty=penalty, scale="none", advantage="batch")
        credit = credit_of(outcome, score, stage=1)
        assert credit.figures["return_guide"] == pytest.approx(1 - penalty * share)
        # A hint that leaks is worth the penalty less than one that does not.
        expected = [penalty * (share - each.leaks) for each in mine]
        assert credit.guide.tolist() == pytest.approx(expected, abs=1e-6)
        assert credit.second.tolist() == pytest.approx([0] * N)


def test_a_right_answer_that_was_cut_off_is_worth_nothing_and_is_counted(judge: EpisodeJudge):
    whole = episode(0, leaks=False)
    cut = whole._replace(second=whole.second._replace(ids=whole.second.said, is_truncated=True))
    verdicts = judge.judge([whole, cut], heartbeat=Heartbeat())
    assert [(verdict.second, verdict.right[1], verdict.n_cut) for verdict in verdicts] == [(1, True, 0), (0, False, 1)]
    said = describe(verdicts)
    assert (said["acc_t2"], said["reward_t2"], said["i2c"]) == (0.5, 0.5, 0.5)
    assert said["truncated"] == 0.25  # one of four answers
