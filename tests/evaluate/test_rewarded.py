"""The figures of judged answers beside hand counts: means of what is known, the share that passes, statuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sftplay.config.data import RewardConfig
from sftplay.data.load_prompts import Question
from sftplay.evaluate.rewarded import Rewarded, compute_figures, reward_answers, write_evaluation
from sftplay.reward.reward_set import BatchRewards
from sftplay.reward.table import RewardValues

REWARDS = [RewardConfig(name="right", use="exact_match"), RewardConfig(name="shape", use="regex", weight=0.5)]


class TwoRewards:
    """Stands for an opened RewardSet: `right` compares with the answer, or does not know; `shape` counts dots."""

    weights = (1.0, 0.5)

    def __init__(self) -> None:
        self.columns: dict[str, Any] = {}
        self.lengths: list[int] = []

    def score(self, completions: list[str], columns: dict[str, list[Any]], *, completion_ids: Any) -> BatchRewards:
        self.columns, self.lengths = columns, list(map(len, completion_ids))
        right = [None if text == "?" else float(text == want) for text, want in zip(completions, columns["answer"])]
        shape = [float(text.count(".")) for text in completions]
        verdicts: list[Any] = [
            {"status": "ok", "hidden_pass": True}, {"status": "wrong", "hidden_pass": False}, {"status": "infra"}, None,
        ][: len(completions)]  # fmt: skip
        return BatchRewards({"right": RewardValues(right), "shape": RewardValues(shape)}, verdicts)


def answered() -> tuple[TwoRewards, list[Rewarded]]:
    asked = [Question(n, [n], f"question {n}", {"answer": "a.", **({"only": 1} if n else {})}) for n in range(4)]
    rewards = TwoRewards()
    texts, columns = ["a.", "b", "?", "a"], ["answer", "only"]
    given: Any = rewards
    return rewards, reward_answers(given, asked, columns=columns, answers=texts, n_tokens=[2, 1, 1, 4])


def test_means_leave_out_what_is_not_known_and_form_does_not_decide_what_passes():
    rewards, answers = answered()
    assert rewards.lengths == [2, 1, 1, 4]  # tokens, as in training
    assert rewards.columns == {"answer": ["a."] * 4, "only": [None, 1, 1, 1]}
    figures = compute_figures(answers, rewards=REWARDS)
    assert figures["n"] == 4
    assert figures["reward/right"] == pytest.approx(1 / 3)
    assert figures["reward/shape"] == pytest.approx(1 / 4)
    assert figures["reward"] == pytest.approx((1.5 + 0 + 0 + 0) / 4)  # of "?" the shape is known
    assert figures["pass"] == pytest.approx(1 / 3)
    assert figures["pass_stderr"] == pytest.approx((1 / 3 * 2 / 3 / 3) ** 0.5)  # of a share p of n: sqrt(p (1 - p) / n)
    assert figures["hidden_pass"] == pytest.approx(1 / 2)
    assert figures["completion_tokens"] == 2
    assert figures["abstained"] == {"right": 1}
    assert figures["statuses"] == {"infra": 1, "ok": 1, "wrong": 1}
    assert not {"pass", "pass_stderr"} & set(compute_figures(answers, rewards=REWARDS[1:]))


def test_every_answer_stands_beside_the_figures(tmp_path: Path):
    answers = answered()[1]
    path = tmp_path / "step-3.json"
    figures = {"step": 3, **compute_figures(answers, rewards=REWARDS)}
    write_evaluation(path, figures=figures, answers=answers, rewards=REWARDS)
    assert json.loads(path.read_text())["step"] == 3
    lines = [json.loads(line) for line in path.with_suffix(".jsonl").read_text().splitlines()]
    assert [line["correct"] for line in lines] == [True, False, None, False]
    assert lines[0] == {
        "row": 0, "prompt": "question 0", "reference": "a.", "prediction": "a.", "correct": True,
        "rewards": {"right": 1.0, "shape": 1.0}, "reward": 1.5, "verdict": {"status": "ok", "hidden_pass": True},
    }  # fmt: skip
