"""Includes, overrides, precedence and origins."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftplay.config.layers import merge, read_overrides
from sftplay.config.load import load_config
from sftplay.errors import ConfigError, ConfigErrors


@pytest.mark.contract
def test_the_command_line_wins_over_the_file_the_file_over_its_include_and_that_over_the_default(write):
    write("train: {epochs: 1, max_steps: 2, save_steps: 3}\n", "base.yaml")
    text = "include: base.yaml\nmodel: {name: a}\ndata: {train_path: b}\ntrain:\n  max_steps: 20\n  save_steps: 30\n"
    cfg = load_config(write(text), ["train.save_steps=300"])
    assert (cfg.train.epochs, cfg.train.max_steps, cfg.train.save_steps, cfg.train.eval_steps) == (1, 20, 300, None)


@pytest.mark.contract
def test_origins_name_file_and_line_or_the_command_line_and_leave_defaults_out(write):
    write("seed: 7\ntrain:\n  epochs: 1\n", "configs/base.yaml")
    text = "include: base.yaml\nmodel:\n  name: a\ndata: {train_path: b}\ntuning: {lora: {target_modules: [q, k]}}\n"
    cfg = load_config(write(text, "configs/run.yaml"), ["train.max_steps=3", "eval.metrics=[chrf]"])
    assert cfg.origins == {
        "seed": "configs/base.yaml:1",
        "train.epochs": "configs/base.yaml:3",
        "model.name": "configs/run.yaml:3",
        "data.train_path": "configs/run.yaml:4",
        "tuning.lora.target_modules": "configs/run.yaml:5",
        "train.max_steps": "command line",
        "eval.metrics": "command line",
    }


@pytest.mark.contract
def test_an_include_is_found_beside_the_including_file_and_shown_relative_to_the_current_folder(write, tmp_path):
    write("seed: 1\n", "shared/deep/base.yaml")
    write("include: deep/base.yaml\n", "shared/middle.yaml")
    path = write("include: ../shared/middle.yaml\nmodel: {name: a}\ndata: {train_path: b}\n", "my runs/run.yaml")
    assert load_config(path).origins["seed"] == "shared/deep/base.yaml:1"
    typed = str(tmp_path / path)
    assert load_config(typed).origins["seed"] == "shared/deep/base.yaml:1"
    assert load_config(typed).origins["model.name"] == f"{typed}:2"


@pytest.mark.contract
def test_of_several_includes_the_later_one_wins(write):
    write("seed: 1\nrun_name: one\n", "one.yaml")
    write("seed: 2\n", "two.yaml")
    cfg = load_config(write("include: [one.yaml, two.yaml]\nmodel: {name: a}\ndata: {train_path: b}\n"))
    assert (cfg.seed, cfg.run_name) == (2, "one")


@pytest.mark.contract
def test_includes_that_lead_in_a_circle_are_refused_at_the_line_that_closes_it(write):
    write("seed: 1\ninclude: run.yaml\n", "base.yaml")
    with pytest.raises(ConfigError, match=r"leads back to itself: run\.yaml -> base\.yaml -> run\.yaml") as caught:
        load_config(write("include: base.yaml\n"))
    assert caught.value.where == "base.yaml:2 include"


@pytest.mark.contract
def test_the_same_file_included_twice_without_a_circle_is_fine(write):
    write("seed: 5\n", "base.yaml")
    write("include: base.yaml\n", "one.yaml")
    cfg = load_config(write("include: [one.yaml, base.yaml]\nmodel: {name: a}\ndata: {train_path: b}\n"))
    assert cfg.seed == 5


@pytest.mark.contract
def test_a_missing_include_is_named_with_the_path_that_would_work(write):
    write("seed: 1\n", "configs/base.yaml")
    with pytest.raises(ConfigError, match=r"no such file: configs/configs/base\.yaml") as caught:
        load_config(write("include: configs/base.yaml\n", "configs/run.yaml"))
    assert caught.value.where == "configs/run.yaml:1 include"
    assert "include: base.yaml" in caught.value.fix


@pytest.mark.contract
@pytest.mark.parametrize("value", ["3", "{a: b}", "[1]", "''", "", "null"])
def test_an_include_that_is_no_path_is_refused(write, value):
    with pytest.raises(ConfigError, match="is no path and no list of paths") as caught:
        load_config(write(f"seed: 1\ninclude: {value}\n"))
    assert caught.value.where == "run.yaml:2 include"


@pytest.mark.contract
def test_a_section_with_every_key_commented_out_changes_nothing(write):
    write("train: {epochs: 1}\ntuning: {lora: {r: 4}}\n", "base.yaml")
    text = (
        "include: base.yaml\nmodel: {name: a}\ndata: {train_path: b}\ntrain:\n  # epochs: 2\ntuning:\n  lora:\neval:\n"
    )
    cfg = load_config(write(text))
    assert (cfg.train.epochs, cfg.tuning.lora.r, cfg.eval.limit) == (1, 4, 200)


@pytest.mark.contract
def test_a_list_is_replaced_as_a_whole_and_null_unsets_a_value(write):
    write("data: {val_path: v}\ntuning: {lora: {modules_to_save: [a, b]}}\n", "base.yaml")
    text = "include: base.yaml\nmodel: {name: a}\ndata: {train_path: b, val_path: null}\n"
    cfg = load_config(write(text), ["tuning.lora.modules_to_save=[c]"])
    assert cfg.data.val_path is None
    assert cfg.tuning.lora.modules_to_save == ["c"]


def test_an_entry_of_a_list_of_words_is_changed_by_its_number_and_none_is_added(write):
    text = "model: {name: a}\ndata: {train_path: b}\ntuning: {lora: {target_modules: [q_proj, v_proj]}}\n"
    path = write(text)
    assert load_config(path, ["tuning.lora.target_modules.0=k_proj"]).tuning.lora.target_modules == ["k_proj", "v_proj"]
    for name in ("2", "k"):
        with pytest.raises(ConfigError, match=f"tuning.lora.target_modules has no entry called '{name}'") as caught:
            load_config(path, [f"tuning.lora.target_modules.{name}=k_proj"])
        assert caught.value.where == f"command line tuning.lora.target_modules.{name}"
        assert caught.value.fix == "tuning.lora.target_modules has 0, 1"


def test_an_override_may_start_with_two_dashes_and_the_last_of_two_counts(load):
    cfg = load("", "--train.max_steps=3", "train.max_steps=4", "--seed=1")
    assert (cfg.train.max_steps, cfg.seed) == (4, 1)


def test_an_override_follows_the_rules_of_yaml(load):
    cfg = load(
        "", "train.learning_rate=2e-4", "run_name='42'", "eval.metrics=[chrf, rouge_l]", "eval.limit=null",
        "train.max_steps=", "train={epochs: 2}", 'model.revision="a: b"', "eval.before=true",
    )  # fmt: skip
    assert cfg.train.learning_rate == 0.0002
    assert cfg.run_name == "42"
    assert cfg.eval.metrics == ["chrf", "rouge_l"]
    assert (cfg.eval.limit, cfg.train.max_steps, cfg.train.epochs) == (None, None, 2)
    assert cfg.model.revision == "a: b"
    assert cfg.eval.before is True


def test_an_override_may_contain_signs_that_mean_something_in_a_yaml_file(load):
    for text in ("#1", "a: b", "a=b", "*x", "- a", "a #b", "50%", "it's"):
        assert load("", f"run_name={text}").run_name == text


@pytest.mark.parametrize("text", ["train.max_steps", "=3", "train.=3", ".seed=3", "", "train..epochs=3", "--", "--=3"])
def test_an_override_that_is_not_key_equals_value_is_refused(refusals, text):
    (problem,) = refusals("", text)
    assert problem.where == "command line"
    assert "not of the form key=value" in problem.what


def test_an_override_with_an_open_bracket_or_an_include_is_refused(refusals):
    bracket, include = refusals("", "eval.metrics=[chrf", "include=base.yaml")
    assert bracket.where == "command line eval.metrics"
    assert include.what == "include works in a file only"


TREES = st.recursive(
    st.integers(), lambda inner: st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3), max_leaves=8
)


def _laid_over(below, above):
    """Reference: the same by the definition, without places."""
    if isinstance(below, dict) and isinstance(above, dict):
        both = {key: _laid_over(below[key], above[key]) for key in below if key in above}
        return {**below, **above, **both}
    return above


@given(st.lists(st.dictionaries(st.sampled_from("abc"), TREES, max_size=3), max_size=4))
def test_layers_merge_key_by_key_and_keep_a_place_for_each_key_and_none_for_others(trees):
    layers = [read_overrides([f"{key}={_flow(value)}" for key, value in tree.items()])[0] for tree in trees]
    merged = merge(layers)
    expected = {}
    for tree in trees:
        expected = _laid_over(expected, tree)
    assert merged.values == expected
    assert set(merged.locations) == set(_paths(expected))


def _flow(value):
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow(inner)}" for key, inner in value.items()) + "}"
    return str(value)


def _paths(tree, path=()):
    for key, value in tree.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from _paths(value, (*path, key))


@pytest.mark.contract
def test_a_file_that_is_missing_is_named_as_it_was_typed(write):
    write("")
    with pytest.raises(ConfigError, match="no such file") as caught:
        load_config("configs/gone.yaml")
    assert caught.value.where == "configs/gone.yaml"


@pytest.mark.contract
def test_problems_come_in_the_order_of_the_file_then_its_includes_then_the_command_line(write):
    write("sede: 1\ntrain: {epochs: 0}\n", "base.yaml")
    text = "include: base.yaml\nmodel: {name: a}\ndata: {train_path: b}\ntask_mode: sfft\nrun_naem: x\n"
    with pytest.raises(ConfigErrors) as caught:
        load_config(write(text), ["eval.limit=big", "logging.step=1"])
    assert [problem.where for problem in caught.value.problems] == [
        "run.yaml:4 task_mode",
        "run.yaml:5 run_naem",
        "base.yaml:1 sede",
        "base.yaml:2 train.epochs",
        "command line eval.limit",
        "command line logging.step",
    ]
