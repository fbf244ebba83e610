"""`~` is the user's home folder wherever a path is taken, and never a folder of that name."""

from __future__ import annotations

import pytest

from sftplay.cli import VERBS, find_flags, parse
from sftplay.config.keys import path_keys
from sftplay.config.load import load_config
from sftplay.config.resolved import dump_resolved
from sftplay.config.run import RunConfig
from sftplay.flags import PATH

PATH_KEYS = path_keys(RunConfig.model_validate({"model": {"name": "builtin:tiny"}}))
BASE = ["model.name=builtin:tiny", "data.train_path=rows.jsonl"]


@pytest.fixture
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_every_key_that_takes_a_path_is_known():
    assert PATH_KEYS == [
        "output_dir", "model.name", "model.adapter", "tuning.new_tokens.path", "train.resume", "data.train_path",
        "data.val_path", "data.test_path", "data.template", "data.processed_dir", "preference.reference",
        "hrm.start_from", "cluster.deepspeed",
    ]  # fmt: skip


@pytest.mark.contract
@pytest.mark.parametrize("key", PATH_KEYS)
def test_a_path_key_takes_the_home_folder_from_file_and_command_line_alike(key, home, write):
    more = ["cluster.strategy=zero2"] if key == "cluster.deepspeed" else []
    cfg = load_config(write("seed: 1\n"), [*BASE, f"{key}=~/x/y", *more])
    assert cfg.get_value(key) == str(home / "x" / "y")
    resolved = write(dump_resolved(cfg), "resolved.yaml")
    assert load_config(resolved).get_value(key) == str(home / "x" / "y")


@pytest.mark.parametrize("key", PATH_KEYS)
def test_the_home_of_a_user_whom_nobody_knows_is_refused_with_the_way_out(key, refusals):
    problems = refusals("", f"{key}=~nobody-here/x")
    (problem,) = [each for each in problems if "home folder" in each.what]
    assert problem.where == f"command line {key}"
    assert "~nobody-here" in problem.what
    assert problem.fix == "write the whole path, or ./~nobody-here/x for a folder of that very name"


@pytest.mark.contract
def test_an_include_may_lie_in_the_home_folder(home, write):
    home.mkdir()
    (home / "base.yaml").write_text("seed: 7\n")
    assert load_config(write("include: ~/base.yaml\n"), BASE).seed == 7


def test_every_flag_that_takes_a_path_knows_the_home_folder(home):
    assert parse(["train", "--config=~/x"]).config == str(home / "x")
    assert parse(["merge-test", "--config=c", "--run=~/x", "--merged=~/y"]).merged == str(home / "y")
    names = {"--run", "--a", "--b", "--in", "--merged", "--setup", "--out"}
    of_verbs = [find_flags(verb) for verb in VERBS]
    assert {flags[name]["type"] for flags in of_verbs for name in names & set(flags)} == {PATH}
