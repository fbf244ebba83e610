"""A key that was renamed is refused with its new name in a user's config, and read by it in an older run's files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sftplay.cli import main
from sftplay.config.keys import REMOVED_KEYS, RENAMED_KEYS, all_keys, all_sections
from sftplay.config.load import load_config, load_resolved
from sftplay.config.resolved import dump_given, dump_resolved
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


@pytest.mark.parametrize("key", REMOVED_KEYS)
def test_a_key_that_was_removed_is_refused_with_what_to_do(key, write):
    *sections, name = key.split(".")
    lines = [f"{'  ' * depth}{part}:" for depth, part in enumerate(sections)]
    problem = refusal(write("\n".join([CONFIG.rstrip(), *lines, f"{'  ' * len(sections)}{name}: 5\n"])))
    assert (problem.where.split(" ")[1], problem.what) == (key, f"no key called {name!r} in {'.'.join(sections)}")
    assert problem.fix == REMOVED_KEYS[key]


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


def with_old_names(text: str) -> str:
    """A config in a run's folder as a release before wrote it, with a key that has gone."""
    for old, new in RENAMED_KEYS.items():
        before, after = (f"\n  {key.partition('.')[2]}:" for key in (new, old))
        assert text.count(before) == 1
        text = text.replace(before, after)
    assert text.count("\ncpt:") == 1
    assert text.count("\n  new_tokens:") == 1
    text = text.replace("\n  new_tokens:", "\n  new_tokens:\n    count: 50  # command line\n    min_count: 10")
    return text.replace("\ncpt:", "\ncpt:\n  streaming: true # command line")


@pytest.fixture
def set_by_new_names(write):
    """A config with a value that is not the default for every key that was renamed."""
    listed = "tuning.new_tokens.path=terms.txt"
    return load_config(write(CONFIG), [listed, *(f"{new}={VALUES[old]}" for old, new in RENAMED_KEYS.items())])


@pytest.mark.parametrize("dump", [dump_resolved, dump_given])
def test_a_file_of_an_older_run_is_read_by_the_new_names(write, set_by_new_names, dump):
    path = write(with_old_names(dump(set_by_new_names)), "written.yaml")
    for cfg in (load_config(path), load_resolved(Path(path))):
        assert cfg.model_dump() == set_by_new_names.model_dump()


def test_the_origins_of_an_older_run_are_read_by_the_new_names(write, set_by_new_names):
    path = write(with_old_names(dump_resolved(set_by_new_names)), "config.resolved.yaml")
    assert load_resolved(Path(path)).origins == set_by_new_names.origins
    line = Path(path).read_text().splitlines().index("  leaks: drop  # command line") + 1
    assert load_config(path).origins["data.contamination"] == f"config.resolved.yaml:{line}"
