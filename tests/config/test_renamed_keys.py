"""A key that was renamed is refused with its new name in a user's config."""

from __future__ import annotations

import json

import pytest

from sftplay.cli import main
from sftplay.config.load import load_config
from sftplay.config.schema.keys import all_keys, all_sections
from sftplay.config.schema.renamed import RENAMED_KEYS
from sftplay.errors import ConfigErrors

VALUES = {
    "grpo.redraws": "2",
    "grpo.skip_silent": "true",
    "grpo.control": "random",
    "grpo.gauge_steps": "3",
    "score.hint_gain": "0.5",
    "data.leaks": "drop",
    "cpt.exhausted": "stop",
}
"""Old key -> a value that is not its default."""

CONFIG = "model: {name: builtin:tiny}\ndata:\n  train_path: rows.jsonl\n"


def section_with(old: str) -> str:
    """The config's last lines, of which the last one has an old key."""
    section, _, name = old.partition(".")
    return ("" if section == "data" else f"{section}:\n") + f"  {name}: {VALUES[old]}\n"


def refusal(path: str, *overrides: str):
    with pytest.raises(ConfigErrors) as caught:
        load_config(path, overrides)
    (problem,) = caught.value.problems
    return problem


def test_a_new_name_is_a_key_in_the_section_of_the_old_one_which_is_none():
    assert set(VALUES) == set(RENAMED_KEYS)
    for old, new in RENAMED_KEYS.items():
        assert new in all_keys()
        assert old not in {*all_keys(), *all_sections()}
        assert old.partition(".")[0] == new.partition(".")[0]


@pytest.mark.parametrize("old", RENAMED_KEYS)
def test_an_old_name_is_refused_with_its_place_and_the_new_name(write, old):
    text = CONFIG + section_with(old)
    write(text, "base.yaml")
    line = len(text.splitlines())
    section, _, name = old.partition(".")
    for path, overrides, place in (
        (write(text), [], f"run.yaml:{line}"),
        (write("include: base.yaml\n", "top.yaml"), [], f"base.yaml:{line}"),
        (write(CONFIG, "plain.yaml"), [f"{old}={VALUES[old]}"], "command line"),
    ):
        problem = refusal(path, *overrides)
        assert problem.where == f"{place} {old}"
        assert problem.what == f"no key called {name!r} in {section}"
        assert problem.fix == f"write {RENAMED_KEYS[old]}: it was renamed"
        assert problem.nearest == [RENAMED_KEYS[old]]


def test_an_old_name_beside_the_new_one_is_refused_too(write):
    path = write(f"{CONFIG}grpo:\n  dynamic_sampling_rounds: 1\n  redraws: 2\n")
    assert refusal(path).where == "run.yaml:6 grpo.redraws"


def test_an_old_name_with_a_dot_in_a_file_is_answered_with_the_lines_to_write(write):
    problem = refusal(write(f"{CONFIG}grpo.redraws: 2\n"))
    assert problem.where == "run.yaml:4 grpo.redraws"
    assert problem.fix == "dots are for the command line: write grpo / dynamic_sampling_rounds, each one indented"


@pytest.mark.contract
def test_a_command_ends_with_code_2_and_says_the_new_name(write, capsys):
    write('{"text": "a row"}\n', "rows.jsonl")
    path = write(f"{CONFIG}grpo:\n  redraws: 2\n")
    assert main(["validate", "--config", path, "--json"]) == 2
    out, err = capsys.readouterr()
    error = json.loads(out)["error"]
    assert (error["code"], error["nearest"]) == ("config", ["grpo.dynamic_sampling_rounds"])
    assert err.splitlines() == [
        "run.yaml:5 grpo.redraws: no key called 'redraws' in grpo",
        "  fix: write grpo.dynamic_sampling_rounds: it was renamed",
    ]
