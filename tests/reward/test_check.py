"""What `reward-check` says of honest rewards, of those that can be hacked, and of those that fail."""

import json
from contextlib import closing

import pytest

from sftplay.errors import ConfigError, DataError
from sftplay.reward.calls import RewardCall
from sftplay.reward.check import check_reward
from sftplay.reward.junk import Case

CASES = [Case(f"#### {n}", {"answer": f"#### {n}"}) for n in (3, 14, 159, 26)]

USER = """
def honest(completions, answer, **_):
    return [float(text.strip() == right) for text, right in zip(completions, answer)]

def has_mark(completions, **_):
    return [float("####" in text) for text in completions]

def contains(completions, answer, **_):
    return [float(right in text) for text, right in zip(completions, answer)]

def longest(completions, **_):
    return [float(len(text)) for text in completions]

def constant(completions, **_):
    return [0.5 for _ in completions]

def against(completions, answer, **_):
    return [float(text != right) for text, right in zip(completions, answer)]

def abstains(completions, **_):
    return [None for _ in completions]

def raises(completions, **_):
    raise ValueError("no")
"""


@pytest.fixture(scope="module")
def user(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "own.py"
    path.write_text(USER)
    return path


def found(use, **options):
    with closing(RewardCall(str(use), options, deadline_s=20.0)) as call:
        return check_reward(call, CASES, name="it")


@pytest.mark.parametrize(
    ("function", "verdict"),
    [
        ("honest", "ok"),
        ("has_mark", "cannot_tell"),
        ("contains", "cannot_tell"),
        ("longest", "cannot_tell"),
        ("against", "cannot_tell"),
        ("constant", "constant"),
        ("abstains", "raises"),
        ("raises", "raises"),
    ],
)
def test_a_reward_of_the_user_s_is_judged_by_what_it_pays_for(user, function, verdict):
    assert found(f"{user}:{function}").verdict == verdict


@pytest.mark.parametrize(
    ("use", "options"),
    [
        ("exact_match", {}),
        ("math", {}),
        ("format", {"form": "hashes"}),
        ("regex", {"pattern": r"#### \d+"}),
        ("length", {"most": 4}),
        ("overlong", {"most": 10, "soft": 5}),
        ("repetition", {}),
    ],
)
def test_shipped_rewards_can_tell(use, options):
    finding = found(use, **options)
    assert (finding.verdict, finding.why) == ("ok", "")


def test_a_pattern_that_takes_everything_is_constant():
    assert found("regex", pattern="(?s).*").verdict == "constant"


def config(tmp_path, rewards, rows=None):
    data = tmp_path / "rows.jsonl"
    rows = rows or [{"question": f"{n} + 1 =", "answer": f"so\n#### {n + 1}"} for n in range(6)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "run.yaml"
    content = {"model": {"name": "builtin:tiny"}, "data": {"train_path": str(data)}, "rewards": rewards}
    path.write_text(json.dumps(content))
    return str(path)


def checked(tmp_path, rewards, capsys, **named):
    from argparse import Namespace

    from sftplay.commands.data.rewards import reward_check

    code = reward_check(Namespace(config=config(tmp_path, rewards, **named), overrides=[], n=32, json=True))
    return code, json.loads(capsys.readouterr().out)


def test_the_verb_reads_rows_and_ends_with_5_unless_all_are_ok(tmp_path, user, capsys):
    right = {"name": "right", "use": "math"}
    code, findings = checked(tmp_path, [right], capsys)
    assert code == 0
    assert [(each["name"], each["verdict"], each["gold_mean"]) for each in findings] == [("right", "ok", 1.0)]
    code, findings = checked(tmp_path, [right, {"name": "hack", "use": f"{user}:has_mark"}], capsys)
    assert code == 5
    assert findings[1]["verdict"] == "cannot_tell"
    assert findings[1]["junk_mean"] == 1.0


def test_a_column_that_the_rows_lack_is_named(tmp_path, capsys):
    with pytest.raises(DataError, match="reads the column entry_point"):
        checked(tmp_path, [{"name": "code", "use": "syntax"}], capsys)


def test_rows_without_different_answers_are_refused(tmp_path, capsys):
    with pytest.raises(DataError, match="fewer than two different answers"):
        checked(tmp_path, [{"name": "right", "use": "math"}], capsys, rows=[{"question": "a", "answer": "b"}])


def test_rows_that_are_left_out_are_said(tmp_path, capsys):
    from sftplay.commands.data.rewards import read_cases
    from sftplay.config.load import load_config

    rows = [
        {"question": "1", "answer": "2"},
        {"text": "no answer"},
        {"question": 7, "answer": "8"},
        {"question": "2", "answer": "3"},
    ]
    cases = read_cases(load_config(config(tmp_path, [{"name": "right", "use": "math"}], rows=rows)), 32)
    assert [case.gold for case in cases] == ["2", "3"]
    assert "2 of the first 32 rows cannot be read" in "".join(capsys.readouterr())


def test_a_config_without_rewards_is_refused(tmp_path, capsys):
    with pytest.raises(ConfigError, match="has no rewards"):
        checked(tmp_path, [], capsys)


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ({"use": "exact_mach"}, "there is no reward 'exact_mach'"),
        ({"use": "regex"}, "needs the option pattern"),
        ({"use": "math", "options": {"falback": "none"}}, "no option 'falback'"),
    ],
)
def test_a_wrong_name_is_refused_before_anything_runs(tmp_path, capsys, reward, said):
    with pytest.raises(ConfigError, match=said):
        checked(tmp_path, [{"name": "it", **reward}], capsys)
