"""An episode without a known reward: it is in no mean, deviation, target or accuracy; and all ranks stop together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_ranks import on_ranks

from sftplay.config.run import RunConfig
from sftplay.data.load_prompts import Question
from sftplay.errors import RunError
from sftplay.heartbeat import Heartbeat
from sftplay.reward.reward_set import BatchRewards
from sftplay.reward.table import RewardValues
from sftplay.tasks.score.evaluation import EpisodeResult, RewardScorer, describe, expect_known
from sftplay.tasks.score.role_models import ValueHead, value_loss
from sftplay.tasks.score.sample_episodes import Action, Episode
from sftplay.tasks.score.section import ScoreConfig
from sftplay.tasks.score.update import Advantages, EpisodeRewards, compute_advantages

GROUP = 4


def rewards(first: list[float], second: list[float], known: list[float], **more: Any) -> EpisodeRewards:
    n = len(first)
    return EpisodeRewards(
        *(torch.tensor(each, dtype=torch.float32) for each in (first, second, known)),
        form_first=torch.ones(n), form_second=torch.ones(n), leak=torch.zeros(n),
        value=more.get("value"), critic=more.get("critic"),
    )  # fmt: skip


def advantages(found: EpisodeRewards, **score: Any) -> Advantages:
    return compute_advantages(found, ScoreConfig(episodes_per_problem=GROUP, alpha=10.0, **score), stage=2)


@pytest.mark.parametrize("advantage", ["rloo", "batch", "value"])
@pytest.mark.parametrize("scale", ["none", "batch"])
def test_known_episodes_are_worth_what_they_are_worth_without_the_unknown_ones(advantage: str, scale: str):
    """Two problems that each lose one of four episodes are two problems of three episodes."""
    first, second = [0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0]
    value = torch.tensor([0.9, 0.8, 0.3, 0.1, 0.2, 0.7, 0.6, 0.4])
    kept = [1, 2, 3, 4, 5, 6]
    whole = advantages(
        rewards(first, second, [float(n in kept) for n in range(8)], value=value), advantage=advantage, scale=scale
    )
    alone = compute_advantages(
        rewards([first[n] for n in kept], [second[n] for n in kept], [1.0] * 6, value=value[kept]),
        ScoreConfig(episodes_per_problem=3, alpha=10.0, advantage=advantage, scale=scale),
        stage=2,
    )
    for mine, its in zip(whole[:3], alone[:3], strict=True):
        assert mine is not None
        assert its is not None
        assert mine[kept].tolist() == pytest.approx(its.tolist(), abs=1e-6)
        assert mine[[0, 7]].tolist() == [0, 0]
    assert {key: pytest.approx(figure) for key, figure in alone.figures.items()} == whole.figures


def test_an_episode_whose_problem_has_no_other_known_one_is_compared_with_nothing():
    found = advantages(rewards([0] * 8, [1, 0, 0, 0, 1, 0, 1, 0], [1, 0, 0, 0, 1, 1, 1, 1]), advantage="rloo")
    assert found.second[:4].tolist() == [0] * 4
    assert found.second.isfinite().all()
    lost = advantages(rewards([0] * 4, [0] * 4, [0] * 4, value=torch.ones(4)))
    assert lost.second.tolist() == [0] * 4
    assert lost.figures["return_t2"] is None


def test_the_critic_is_trusted_by_what_it_explains_of_known_returns():
    second = [1.0, 0.0, 1.0, 0.0]
    good = torch.tensor([11.0, 0.0, 11.0, 500.0])  # off by far where nothing is known
    found = advantages(rewards([0] * 4, second, [1, 1, 1, 0], critic=torch.stack([good, good, good, 0 * good])))
    assert found.figures["critic_is_baseline_t2"] == 1


def test_v_learns_nothing_from_an_unknown_target():
    head = ValueHead(3)
    torch.nn.init.normal_(head.linear.weight)
    seen, target = torch.randn(4, 3), torch.tensor([1.0, 0.0, float("nan"), 1.0])
    known = [0, 1, 3]
    gradients = []
    for states, wanted in ((seen, target), (seen[known], target[known])):
        loss = value_loss(head, states, target=wanted, flow="stop", value_coef=1.0, n_episodes=4)
        assert loss is not None
        gradients.append(torch.autograd.grad(loss, list(head.parameters())))
    for mine, its in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, its)


def result(first: float | None, second: float | None, **more: Any) -> EpisodeResult:
    return EpisodeResult(
        first=first, second=second, is_known=None not in (first, second), form_first=None,
        form_second=first is not None, is_parsed=True, leak=False, n_cut=0, hint_tokens=1, edit_ratio=0.5,
        is_identical=more.get("same", False),
    )  # fmt: skip


def test_accuracies_are_shares_of_the_known_episodes_and_the_others_are_counted():
    known = [result(1.0, 1.0), result(1.0, 0.0), result(0.0, 1.0), result(0.5, 0.0, same=True)]
    told, alone = describe([*known, result(1.0, None), result(None, 0.0, same=True)]), describe(known)
    names = ("acc_t1", "acc_t2", "delta", "i2c", "c2i", "fix_rate", "break_rate", "reward_t1", "reward_t2", "repeats")
    assert {name: told[name] for name in names} == {name: alone[name] for name in names}
    assert told["c2i"] == 0.25
    assert told["abstained"] == pytest.approx(1 / 3)
    assert told["parse_failures"] == pytest.approx(1 / 6)
    lost = [replace(each, first=None, is_known=False) for each in known]
    assert describe(lost)["acc_t2"] is None
    with pytest.raises(RunError, match="none of 4 episodes"):
        expect_known(lost)


def action(*ids: int) -> Action:
    return Action(prompt=[1], ids=[*ids, 2], log_probs=[], is_truncated=False)


EPISODE = Episode(
    question=Question(0, [], "1+1", {"answer": "2"}), first=action(3), hint=None, hint_ids=[], second=action(4)
)


class Words:
    def decode(self, ids: list[int], **_: Any) -> str:
        return " ".join(map(str, ids))


class Rewards:
    """Stands for the processes of a rank's rewards."""

    names = ("tests",)
    weights = (1.0,)

    def __init__(self, value: float | None) -> None:
        self.value = value

    def score(self, texts: list[str], _: Any) -> BatchRewards:
        found = RewardValues(
            [self.value] * len(texts), [] if self.value is not None else ["the sandbox failed: no room"]
        )
        return BatchRewards({"tests": found}, [{"status": "ok"}] * len(texts), frozenset({"tests"}))


def build_scorer(value: float | None, monkeypatch: pytest.MonkeyPatch) -> RewardScorer:
    monkeypatch.setattr("sftplay.tasks.score.evaluation.RewardSet", lambda cfg: Rewards(value))
    cfg = RunConfig.model_validate({"model": {"name": "m"}, "rewards": [{"name": "tests", "use": "code_tests"}]})
    return RewardScorer(cfg, columns=[], tokenizer=Words())


def test_ranks_stop_together_where_the_rewards_of_one_of_them_abstain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Before, the rank with the broken box raised alone, and the other waited for the results."""

    def work() -> tuple[int, str]:
        from sftplay import log

        reward_scorer = build_scorer(None if log.rank() == 0 else 1.0, monkeypatch)
        for call in range(20):
            try:
                reward_scorer.score([EPISODE] * 4, heartbeat=Heartbeat())
            except RunError as error:
                return call, error.what
        return 20, ""

    first, second = on_ranks(2, work, tmp_path / "ranks")
    assert first == second
    calls, what = first
    assert 0 < calls < 20
    assert "the sandbox failed: no room" in what
    assert f"{8 * (calls + 1)} of the {16 * (calls + 1)} answers" in what


def test_a_right_answer_that_was_cut_off_is_worth_nothing_and_is_counted(monkeypatch: pytest.MonkeyPatch):
    cut = EPISODE._replace(second=EPISODE.second._replace(ids=[4], is_truncated=True))
    results = build_scorer(1.0, monkeypatch).score([EPISODE, cut], heartbeat=Heartbeat())
    assert [(found.second, found.right[1], found.n_cut) for found in results] == [(1, True, 0), (0, False, 1)]
    told = describe(results)
    assert (told["acc_t2"], told["reward_t2"], told["truncated"]) == (0.5, 0.5, 0.25)  # one of four answers
