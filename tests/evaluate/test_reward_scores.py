"""Rewards as measures of answers: their values by row, their means, and what is said where nothing is known."""

from sftplay.config.run import RunConfig
from sftplay.evaluate.evaluate import mean_rewards, score_by_rewards

REWARDS = [
    {"name": "same", "use": "exact_match"},
    {"name": "number", "use": "regex", "options": {"pattern": r"\d+"}},
    {"name": "code", "use": "syntax"},
]
CFG = RunConfig.model_validate({"model": {"name": "builtin:tiny"}, "rewards": REWARDS})


def test_each_answer_gets_a_value_of_each_reward_and_what_cannot_be_measured_is_said(capsys):
    scores = score_by_rewards(CFG, ["7", "eight", "9"], columns={"answer": ["7", "eight", "8"]})
    assert scores == {"same": [1, 1, 0], "number": [1, 0, 1]}
    assert "the reward code is not measured: it reads the column entry_point" in "".join(capsys.readouterr())
    assert mean_rewards(scores) == {"reward/same": 2 / 3, "reward/number": 2 / 3}
