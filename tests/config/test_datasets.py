"""The sources of a mixture: entries of a list with places of their own, changed by name or number."""

from __future__ import annotations

import pytest

from sftplay.config.keys import flatten
from sftplay.config.load import load_config, load_resolved
from sftplay.config.resolved import dump_resolved
from sftplay.errors import ConfigError, ConfigErrors

MIXTURE = """\
task_mode: cpt_mixed
model: {name: builtin:tiny}
datasets:
  - {name: domain, path: docs.jsonl, type: cpt, weight: 0.9}
  - name: chat
    path: chats.jsonl
    type: chat
    weight: 0.1
"""


@pytest.fixture
def mixture(write):
    def load(*overrides, text=MIXTURE):
        return load_config(write(text), overrides)

    return load


@pytest.fixture
def refused(mixture):
    def problems(*overrides, text=MIXTURE):
        with pytest.raises(ConfigErrors) as caught:
            mixture(*overrides, text=text)
        return [(problem.where, problem.what, problem.fix) for problem in caught.value.problems]

    return problems


def test_dapt_is_a_spelling_of_cpt(load):
    assert load("task_mode: dapt\n").task_mode == "cpt"
    assert load("", "task_mode=dapt").task_mode == "cpt"


@pytest.mark.contract
@pytest.mark.parametrize("override", ["datasets.chat.weight=0", "datasets.1.weight=0"])
def test_the_command_line_changes_one_entry_by_its_name_or_its_number(mixture, override):
    cfg = mixture(override)
    assert [source.weight for source in cfg.datasets] == [0.9, 0.0]
    assert cfg.origins["datasets.1.weight"] == "command line"
    assert cfg.origins["datasets.1.path"] == "run.yaml:6"
    assert cfg.origins["datasets.0.name"] == "run.yaml:4"


@pytest.mark.contract
def test_a_file_changes_an_entry_of_what_it_includes(mixture, write):
    write(MIXTURE, "base.yaml")
    cfg = mixture(text="include: base.yaml\ndatasets:\n  chat: {weight: 0.3}\n")
    assert [source.weight for source in cfg.datasets] == [0.9, 0.3]
    assert cfg.origins["datasets.1.weight"] == "run.yaml:3"


@pytest.mark.contract
def test_a_list_above_replaces_the_list_below_as_a_whole(mixture):
    cfg = mixture("datasets=[{name: one, path: a.jsonl, type: cpt}]", "datasets.one.weight=2")
    assert [(source.name, source.weight) for source in cfg.datasets] == [("one", 2.0)]
    assert "datasets.1.path" not in cfg.origins


@pytest.mark.contract
def test_an_entry_that_is_not_there_is_refused_with_the_nearest_name(mixture):
    with pytest.raises(ConfigError) as caught:
        mixture("datasets.chatt.weight=0")
    error = caught.value
    assert (error.where, error.what) == ("command line datasets.chatt", "datasets has no entry called 'chatt'")
    assert error.fix == "did you mean 'chat'?"


@pytest.mark.contract
def test_the_resolved_text_keeps_every_entry_and_its_origins(mixture, write, tmp_path):
    cfg = mixture("datasets.chat.split=0.2")
    write(dump_resolved(cfg), "resolved.yaml")
    again = load_resolved(tmp_path / "resolved.yaml")
    assert again == cfg
    assert again.origins == cfg.origins
    assert again.get_value("datasets.1.split") == 0.2
    assert again.with_values({"datasets.0.weight": 0.5}, "x").datasets[0].weight == 0.5


def test_a_resume_compares_each_key_of_each_entry(mixture):
    assert flatten(mixture())["datasets.1.weight"] == 0.1
    assert flatten(mixture("datasets=[{name: one, path: a.jsonl, type: cpt}]"))["datasets.0.val_path"] is None


@pytest.mark.contract
@pytest.mark.parametrize(
    ("overrides", "where", "what"),
    [
        (["datasets.1.wieght=0"], "command line datasets.1.wieght", "no key called 'wieght' in datasets.1"),
        (["datasets.0.type=chatty"], "command line datasets.0.type", "no type called 'chatty'"),
        (["datasets.0.weight=-1"], "command line datasets.0.weight", "-1 is not a number of at least 0"),
        (["datasets.0.name=chat"], "run.yaml:5 datasets.1.name", "'chat' is the name of datasets.0.name too"),
        (["datasets=3"], "command line datasets", "3 stands where a list belongs"),
        (["datasets=[{name: a, type: cpt}]"], "command line datasets.0.path", "required, but not given"),
        (["datasets=[]"], "run.yaml:1 task_mode", "cpt_mixed needs datasets"),
        (["task_mode=sft"], "run.yaml:3 datasets", "are for task modes cpt and cpt_mixed, not for sft"),
        (
            ["task_mode=dapt"],
            "run.yaml:7 datasets.1.type",
            "'chat' is chat, but task_mode cpt learns documents only",
        ),
        (
            ["data.train_path=x.jsonl"],
            "command line data.train_path",
            "is given, but datasets names the rows already",
        ),
        (
            ["datasets.0.weight=0", "datasets.1.weight=0"],
            "command line datasets.0.weight",
            "every weight is 0, so nothing would be trained on",
        ),
        (
            ["cpt.block_size=4096"],
            "command line cpt.block_size",
            "4096 is more than model.max_seq_len 2048",
        ),
        (
            ["cpt.block_size=64", "eval.stride=64"],
            "command line eval.stride",
            "64 is not less than the window, a block of 64 tokens",
        ),
        (
            ["cpt.train_tokens=100", "train.max_steps=5"],
            "command line cpt.train_tokens",
            "100 is given, but train.max_steps 5 says how long the run is",
        ),
        (
            ["datasets.0.split=0.1", "datasets.0.val_path=v.jsonl"],
            "command line datasets.0.split",
            "0.1 is given, but datasets.0.val_path names the held-out rows already",
        ),
    ],
)
def test_a_mixture_that_cannot_be_is_refused_at_the_entry(refused, overrides, where, what):
    assert [(where, what)] == [found[:2] for found in refused(*overrides)]


@pytest.mark.contract
def test_rows_are_named_by_one_of_two_keys(refused, mixture):
    nameless = "task_mode: cpt\nmodel: {name: builtin:tiny}\n"
    assert [found[:2] for found in refused(text=nameless)] == [("run.yaml data.train_path", "required, but not given")]
    cfg = mixture("data.train_path=a.jsonl", "data.val_path=v.jsonl", text=nameless)
    assert [(source.name, source.path, source.type, source.val_path) for source in cfg.sources] == [
        ("documents", "a.jsonl", "cpt", "v.jsonl")
    ]


@pytest.mark.contract
def test_a_block_is_as_long_as_the_model_reads_where_nothing_else_is_said(mixture):
    assert mixture("model.max_seq_len=64").row_tokens == 64
    assert mixture("model.max_seq_len=64", "cpt.block_size=32").row_tokens == 32
