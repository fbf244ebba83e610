"""What `reward-check` says of honest rewards, of those that can be hacked, and of those that fail."""

import json
import os
from argparse import Namespace
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import pytest
from patience import PATIENT_BOX
from processes import HANG_S

from sftplay.cli import main
from sftplay.commands.reward_check import reward_check
from sftplay.config.data import RewardConfig
from sftplay.config.load import load_config
from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError, DataError
from sftplay.reward.reward_set import RewardSet, RewardWorker
from sftplay.runs.reward_check import Case, check_before_training, check_reward
from sftplay.sandbox.pool import SAFE, find_problem

needs_jsonschema = pytest.mark.skipif(
    find_spec("jsonschema") is None, reason="needs jsonschema: make install EXTRAS=reward"
)

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = [path for path in sorted(ROOT.glob("configs/*.yaml")) if "\nrewards:" in path.read_text()]
assert len(CONFIGS) >= 2
needs_boxes = pytest.mark.skipif(all(map(find_problem, SAFE)), reason="needs bubblewrap or sandlock")

CASES = [Case(f"#### {n}", {"answer": f"#### {n}"}) for n in (3, 14, 159, 26)]

USER = """
def honest(completions, answer, **_):
    return [float(text.strip() == right) for text, right in zip(completions, answer)]

def has_mark(completions, **_):
    return [float("####" in text) for text in completions]

def constant(completions, **_):
    return [0.5 for _ in completions]

def abstains(completions, **_):
    return [None for _ in completions]

def is_short(completions, **_):
    return [float(0 < len(text) < 60) for text in completions]
"""


@pytest.fixture(scope="module")
def user(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "own.py"
    path.write_text(USER)
    return path


@pytest.mark.parametrize(
    ("use", "options", "verdict"),
    [
        ("own.py:honest", {}, "ok"),
        ("own.py:has_mark", {}, "cannot_tell"),
        ("own.py:is_short", {}, "cannot_tell"),
        ("own.py:constant", {}, "constant"),
        ("own.py:abstains", {}, "raises"),
        ("exact_match", {}, "ok"),
        ("math", {}, "ok"),
        ("format", {"form": "hashes"}, "ok"),
        ("regex", {"pattern": r"#### \d+"}, "ok"),
        ("length", {"most": 4}, "ok"),
        ("overlong", {"most": 10, "soft": 5}, "ok"),
        ("repetition", {}, "ok"),
    ],
)
def test_a_reward_is_judged_by_what_it_pays_for(user, use, options, verdict):
    use = use.replace("own.py", str(user))
    with closing(RewardWorker(use, options, deadline_s=HANG_S)) as call:
        check = check_reward(call, CASES, reward=RewardConfig(name="it", use=use, options=options))
    assert check.verdict == verdict, check.why


def patient(rewards):
    """The same, and no busy machine cuts them off."""
    return [{"deadline": HANG_S, **reward} for reward in rewards]


def config(tmp_path, rewards, rows=None):
    data = tmp_path / "rows.jsonl"
    rows = rows or [{"question": f"{n} + 1 =", "answer": f"so\n#### {n + 1}"} for n in range(6)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "run.yaml"
    listed = patient(rewards)
    content = {"model": {"name": "builtin:tiny"}, "data": {"train_path": str(data)}, "rewards": listed}
    if "code_tests" in str(rewards):
        content["sandbox"] = PATIENT_BOX
    path.write_text(json.dumps(content))
    return str(path)


def checked(tmp_path, rewards, capsys, **named):
    code = reward_check(
        Namespace(config=config(tmp_path, rewards, **named), overrides=[], run=None, input="", n=32, json=True)
    )
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


PROBLEMS = [
    {
        "task_id": 600 + n, "text": f"Add {n}.", "code": f"def add_{n}(x):\n    return x + {n}", "test_setup_code": "",
        "test_list": [f"assert add_{n}({x}) == {x + n}" for x in (1, 5, 9)],
    }
    for n in range(1, 7)
]  # fmt: skip


@pytest.mark.contract
@needs_boxes
def test_a_problem_whose_own_solution_fails_is_named(tmp_path, capsys):
    wrong = {**PROBLEMS[0], "text": "Add 0.", "code": "def add_1(x):\n    return x"}
    path = config(tmp_path, [{"name": "tests", "use": "code_tests"}], rows=[*PROBLEMS, *PROBLEMS, wrong])
    assert main(["reward-check", "--config", path, "--json"]) == 0
    assert f"{tmp_path}/rows.jsonl:13 is solved by no answer" in capsys.readouterr().err


@pytest.mark.contract
def test_a_function_that_is_not_there_is_named_with_its_line_before_a_run_begins(tmp_path, user, capsys):
    path, out = config(tmp_path, [{"name": "own", "use": f"{user}:nothing"}]), tmp_path / "out"
    assert main(["train", "--config", path, f"output_dir={out}"]) == 2
    said = capsys.readouterr().err
    assert f"{path}:1 rewards.0.use: " in said
    assert not out.exists()


@pytest.mark.slow
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_config_has_rewards_that_can_tell(path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    if "code_tests" in path.read_text() and all(map(find_problem, SAFE)):
        pytest.skip("needs bubblewrap or sandlock")
    waits = [f"rewards.{n}.deadline={HANG_S}" for n in range(len(load_config(str(path)).rewards))]
    if "code_tests" in path.read_text():
        waits += [f"sandbox.{key}={value}" for key, value in PATIENT_BOX.items()]
    assert reward_check(Namespace(config=str(path), overrides=waits, run=None, input="", n=6, json=True)) == 0
    assert {each["verdict"] for each in json.loads(capsys.readouterr().out.splitlines()[-1])} == {"ok"}


ROWS = [{"prompt": f"{n} + 1 =", "answer": f"{n + 1}"} for n in range(6)]


def before_training(rewards, rows=ROWS):
    cfg = RunConfig.model_validate({"model": {"name": "builtin:tiny"}, "rewards": patient(rewards)})
    with RewardSet(cfg) as opened:
        return check_before_training(cfg, rows, rewards=opened)


@pytest.mark.contract
def test_a_run_that_would_learn_from_such_a_reward_does_not_begin_and_names_what_its_function_does_not_get(
    tmp_path, user, capsys, monkeypatch
):
    for name in [name for name in os.environ if "KEY" in name or "TOKEN" in name or "AUTH" in name]:
        monkeypatch.delenv(name)
    for name in ("JUDGE_API_KEY", "MAIL_TOKEN", "SFTPLAY_PASS_MAIL_TOKEN"):
        monkeypatch.setenv(name, "1")
    bad = {"name": "hack", "use": f"{user}:has_mark"}
    path, out = config(tmp_path, [bad]), tmp_path / "out"
    small = ["task_mode=grpo", f"output_dir={out}", "train.effective_batch_size=8"]
    assert main(["train", "--config", path, *small]) == 5
    said = capsys.readouterr()
    assert "hack: cannot tell" in said.err
    assert not out.exists()
    (line,) = [line for line in said.out.splitlines() if "JUDGE_API_KEY" in line]
    assert "do not get the secrets" in line
    assert "MAIL_TOKEN" not in line
    assert "export SFTPLAY_PASS_JUDGE_API_KEY=..." in line
    shipped = config(tmp_path, [{"name": "mark", "use": "regex", "options": {"pattern": "lorem.*"}}])
    assert main(["train", "--config", shipped, *small]) == 5
    assert "JUDGE_API_KEY" not in capsys.readouterr().out
    assert main(["train", "--config", path, *small, "--dry-run"]) == 0
    capsys.readouterr()
    (given := tmp_path / "given.jsonl").write_text('{"completion": "a"}\n')
    for more, code in (([], 5), (["--in", str(given)], 0)):  # the verb says what a run says
        assert main(["reward-check", "--config", config(tmp_path, [bad]), *more]) == code
        assert line in capsys.readouterr().out.splitlines()


def test_a_column_that_no_row_has_is_missed_also_where_nothing_can_be_tried():
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    for use, column in (("code_tests", "tests"), ("exact_match", "answer")):
        rewards = [{"name": "it", "use": use}]
        cfg = RunConfig.model_validate({"model": {"name": "builtin:tiny"}, "rewards": rewards})
        with pytest.raises(DataError, match=f"the reward it reads the column {column}, which no row has"):
            check_before_training(cfg, rows, rewards=None)


def test_what_is_only_measured_or_judges_form_does_not_stop_a_run(user, capsys):
    form = {"name": "brief", "use": f"{user}:is_short", "judges": "form"}
    measured = {"name": "constant", "use": f"{user}:constant", "weight": 0}
    never = {"name": "never", "use": "regex", "options": {"pattern": "<b>.*</b>"}}
    assert [each.verdict for each in before_training([form, measured, never])] == ["ok", "constant", "constant"]
    assert "the reward never cannot be tried on these rows: everything gets 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rewards", "rows", "error", "said"),
    [
        ([{"name": "code", "use": "syntax"}], None, DataError, "reads the column entry_point"),
        ([{"name": "right", "use": "math"}], [{"question": "a", "answer": "b"}], DataError, "fewer than two different"),
        ([], None, ConfigError, "has no rewards"),
    ],
)
def test_rows_and_rewards_that_do_not_fit_are_refused(tmp_path, capsys, rewards, rows, error, said):
    with pytest.raises(error, match=said):
        checked(tmp_path, rewards, capsys, rows=rows)


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ({"use": "math", "name": "a b"}, r"'a b' is not text that matches \^\[A-Za-z0-9_-\]"),
        ({"use": "regex"}, "needs the option pattern"),
        ({"use": "code_tests", "options": {"mode": "al"}}, "mode of the reward code_tests is 'al'"),
        ({"use": "math", "options": {"falback": "none"}}, "no option 'falback'"),
        ({"use": "code_tests", "options": {"shown_weight": "half"}}, "shown_weight of the reward code_tests is 'half'"),
        ({"use": "repetition", "options": {"words": 0}}, "words of the reward repetition is 0\n.*1 or more"),
        ({"use": "regex", "options": {"pattern": "("}}, r"pattern of the reward regex is '\('\n.*unterminated"),
        pytest.param(
            {"use": "json_schema", "options": {"schema": {"type": "objct"}}}, "\n.*'objct' is not valid",
            marks=needs_jsonschema,
        ),
        pytest.param(
            {"use": "json_schema", "options": {"schema": "{"}}, "\n.*it is no JSON schema", marks=needs_jsonschema
        ),
        ({"use": "json_schema", "options": {"schema": [{"type": "object"}]}}, "schema of the reward json_schema is"),
    ],
)  # fmt: skip
def test_a_wrong_name_is_refused_before_anything_runs(tmp_path, capsys, reward, said):
    with pytest.raises(ConfigError, match=said):
        checked(tmp_path, [{"name": "it", **reward}], capsys)


OBJECTS = {
    "task_id": 650, "text": "Make a list.", "test_setup_code": "",
    "code": "class Node:\n    def __init__(self, v): self.v = v",
    "test_list": ["assert Node(3).v == 3", "n = Node(4)\nassert n.v == 4"],
}  # fmt: skip


@needs_boxes
def test_the_row_that_paid_a_forgery_is_named_however_many_rows_pay_none(tmp_path, capsys):
    tests = {"name": "tests", "use": "code_tests"}
    code, (finding,) = checked(tmp_path, [tests], capsys, rows=[*PROBLEMS, OBJECTS])
    place = f"{tmp_path}/rows.jsonl:7"
    assert (code, finding["verdict"], finding["in_process"]) == (5, "cannot_tell", [place])
    assert finding["junk"]["a program that forges its verdict"] == pytest.approx(1 / 7)
    assert {"a program that ends itself", "the first test by heart"} < set(finding["junk"])
    assert finding["paid"] == [f"{place} pays a program that forges its verdict 1"]


def given(tmp_path, rewards, rows):
    path = tmp_path / "completions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["reward-check", "--config", config(tmp_path, rewards), "--in", str(path), "--json"]


def test_each_reward_says_what_it_pays_given_completions(tmp_path, user, capsys):
    rewards = [
        {"name": "right", "use": "math"},
        {"name": "form", "use": "format", "weight": 0.1, "options": {"form": "boxed"}},
    ]
    rows = [{"completion": text, "answer": "42"} for text in ("\\boxed{42}", "The answer is 42.", "?", "\\boxed{41}")]
    assert main(given(tmp_path, rewards, rows)) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["rewards"] for row in found] == [
        {"right": 1.0, "form": 1.0}, {"right": 1.0, "form": 0.0}, {"right": 0.0, "form": 0.0},
        {"right": 0.0, "form": 1.0},
    ]  # fmt: skip
    assert [row["total"] for row in found] == [1.1, 1.0, 0.0, 0.1]
    assert [row["verdict"] for row in found] == [None] * 4


@pytest.mark.contract
def test_the_total_is_unknown_where_a_reward_for_content_is(tmp_path, user, capsys):
    form = {"name": "form", "use": "format", "options": {"form": "boxed"}}
    rows = [{"completion": "\\boxed{42}"}]
    assert main(given(tmp_path, [{"name": "own", "use": f"{user}:abstains"}, form], rows)) == 0
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert row == {"rewards": {"own": None, "form": 1.0}, "total": None, "verdict": None}
    assert main(given(tmp_path, [{"name": "own", "use": f"{user}:abstains", "weight": 0}, form], rows)) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rows"][0]["total"] == 1.0


@pytest.mark.contract
@pytest.mark.parametrize(
    ("row", "said"),
    [({"answer": "4"}, "completion is None"), ({"completion": "4"}, "reads the column answer"), ([], "cannot be read")],
)
def test_a_given_row_that_no_reward_can_judge_is_named(tmp_path, capsys, row, said):
    assert main(given(tmp_path, [{"name": "right", "use": "math"}], [{"completion": "4", "answer": "4"}, row])) == 4
    refused = capsys.readouterr().err
    assert said in refused
    assert "completions.jsonl:2" in refused


def test_an_environment_that_fails_is_asked_for_no_junk_and_says_so_once(tmp_path, capsys):
    (tmp_path / "game.py").write_text(
        f"class Game:\n    def reset(self, row):\n        open({str(tmp_path / 'asked')!r}, 'a').write('x')\n"
        "    def step(self, text):\n        raise ValueError('no such room')\n"
    )
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{n}", "answer": "{n} steps"}}\n' for n in range(4)))
    config = tmp_path / "run.yaml"
    config.write_text(
        f"task_mode: grpo\nmodel: {{name: builtin:tiny}}\ndata: {{train_path: {tmp_path}/rows.jsonl}}\n"
        f"grpo: {{environment: '{tmp_path}/game.py:Game'}}\nrewards: [{{name: game, use: environment}}]\n"
    )
    assert main(["reward-check", "--config", str(config)]) == 5
    said = capsys.readouterr().err
    assert (
        said.splitlines()[-2] == "rewards: game: raises (the environment raised ValueError: no such room (game.py:5))"
    )
    assert (tmp_path / "asked").read_text() == 4 * "x"


@pytest.mark.parametrize("n", ["0", "-1", "x"])
def test_no_rows_at_all_are_no_number_of_rows(n, capsys):
    assert main(["reward-check", "--config", "configs/run_grpo_toy.yaml", "--n", n]) == 2
    assert "not a number, 1 or more" in capsys.readouterr().err
