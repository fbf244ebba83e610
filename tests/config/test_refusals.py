"""What a refused config says: place, value, one action, nearest name."""

import shlex
from pathlib import Path

import pytest

from sftplay.config.load import load_config
from sftplay.errors import ConfigError, ConfigErrors


@pytest.mark.contract
def test_four_kinds_of_typos_are_each_answered_with_file_line_and_the_nearest_name(write):
    text = """\
        # a comment
        task_mode: grop
        model: {name: builtin:tiny}
        data: {train_path: rows.jsonl}
        tuning:
          mode: qlroa
        train:
          max_stesp: 3
        loging: {steps: 1}
        """
    with pytest.raises(ConfigErrors) as caught:
        load_config(write(text))
    assert str(caught.value).splitlines() == [
        "run.yaml:2 task_mode: no task called 'grop'",
        "  fix: did you mean 'grpo'?",
        "run.yaml:6 tuning.mode: no mode called 'qlroa'",
        "  fix: did you mean 'qlora'?",
        "run.yaml:8 train.max_stesp: no key called 'max_stesp' in train",
        "  fix: did you mean 'max_steps'?",
        "run.yaml:9 loging: no key or section called 'loging'",
        "  fix: did you mean 'logging'?",
    ]
    assert [problem.nearest[0] for problem in caught.value.problems] == ["grpo", "qlora", "train.max_steps", "logging"]


WRONG = {
    "train: {batch_size: big}": ("train.batch_size", "'big' is not a whole number of at least 1, or auto", "auto"),
    "train: {batch_size: atuo}": ("train.batch_size", "'atuo'", "did you mean 'auto'?"),
    "train: {batch_size: 8.0}": ("train.batch_size", "8.0", "write 8"),
    "train: {epochs: yes}": ("train.epochs", "'yes' is not a number above 0", "write a number above 0"),
    "train: {epochs: '3'}": ("train.epochs", "'3' is not a number", "remove the quotes"),
    "train: {max_steps: 1e3}": ("train.max_steps", "1000.0 is not a whole number", "write 1000"),
    "train: {max_steps: None}": ("train.max_steps", "'None' is not", "write null"),
    "train: {warmup_ratio: 1}": ("train.warmup_ratio", "1 is not a number of at least 0 and below 1", "below 1"),
    "train: {learning_rate: .inf}": ("train.learning_rate", "inf is not", "number"),
    "train: {gradient_checkpointing: no}": ("train.gradient_checkpointing", "'no' is not true or false", "write false"),
    "train: {precision: bf61}": ("train.precision", "no precision called 'bf61'", "did you mean 'bf16'?"),
    "train: {precision: int8}": ("train.precision", "no precision called 'int8'", "write fp32, bf16, fp16 or auto"),
    "train: 3": ("train", "3 stands where a section belongs", "epochs, max_steps"),
    "tuning: {lora: {target_modules: all}}": ("tuning.lora.target_modules", "'all' is not auto, or a list", "list"),
    "tuning: {lora: {target_modules: [q, 3]}}": ("tuning.lora.target_modules.1", "3 is not", "list of names"),
    "train: {extra: 3}": ("train.extra", "3 is not keys with values", "keys with values"),
    "logging: {backend: [wandb, mlflov]}": ("logging.backend.1", "no backend called 'mlflov'", "'mlflow'"),
    "logging: {backend: [none]}": ("logging.backend.0", "'none' stands in a list", "write logging.backend: none"),
    "seed: -1": ("seed", "-1 is not a whole number of at least 0 and below 4294967296", "whole number"),
    "run_name: 3": ("run_name", "3 is not text, or null", "write text, or null; in quotes it is text"),
    "run_name: 007": ("run_name", "7 is not text, or null", "write text, or null; in quotes it is text"),
    "train: {extra: true}": ("train.extra", "true is not keys with values", "write keys with values"),
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_value_is_shown_with_what_is_accepted(refusals, text):
    key, what, fix = WRONG[text]
    (problem,) = refusals(text + "\n")
    assert problem.where == f"run.yaml:1 {key}"
    assert what in problem.what
    assert fix in problem.fix


def test_a_number_that_shall_be_text_is_taken_as_it_is_advised(write):
    config = write("model: {name: builtin:tiny}\ndata: {train_path: rows.jsonl}\n")
    with pytest.raises(ConfigErrors) as caught:
        load_config(config, ["run_name=007"])
    quoted = caught.value.problems[0].fix.rpartition(", on the command line ")[2]
    assert load_config(config, [f"run_name={shlex.split(quoted)[0]}"]).run_name == "007"


@pytest.mark.contract
def test_a_missing_required_key_is_named_with_the_file_and_what_to_write(write):
    with pytest.raises(ConfigErrors) as caught:
        load_config(write("seed: 1\ndata:\n  format: alpaca\n"))
    name, path = caught.value.problems
    assert (name.where, name.what) == ("run.yaml model.name", "required, but not given")
    assert name.fix.startswith("add model.name: a hub name")
    assert path.where == "run.yaml:2 data.train_path"


@pytest.mark.contract
def test_a_misspelt_section_or_key_is_not_reported_as_missing_too(write):
    with pytest.raises(ConfigErrors) as caught:
        load_config(write("modle: {name: a}\ndata: {train_pth: b}\n"))
    assert [problem.where for problem in caught.value.problems] == ["run.yaml:1 modle", "run.yaml:2 data.train_pth"]


def test_a_known_key_in_the_wrong_section_is_answered_with_its_place(refusals):
    rate, width, size = refusals("learning_rate: 1e-4\ntuning: {r: 8}\nbatch_size: 4\n")
    assert "write train.learning_rate" in rate.fix
    assert "write tuning.lora.r" in width.fix
    assert "write train.batch_size or eval.batch_size" in size.fix


def test_a_dotted_key_in_a_file_is_answered_with_how_to_nest_it(refusals):
    dotted, empty = refusals("train.max_steps: 3\n'': 1\n")
    assert dotted.fix == "dots are for the command line: write train / max_steps, each one indented"
    assert empty.fix.startswith("remove it; the config has task_mode")


def test_a_name_like_no_other_is_answered_with_the_names_there_are(refusals):
    (problem,) = refusals("logging: {zzz: 1}\n")
    assert problem.fix == "remove it; logging has backend, steps, row_ids"


def test_rules_between_right_values_are_checked_beside_wrong_values(refusals):
    text = "sede: 1\ndata_: 1\ntrain: {batch_size: 5, epochs: 0, extra: {adam_beta3: 1}}\nrun_name: a/b\n"
    keys = [problem.where.split()[-1] for problem in refusals(text)]
    assert set(keys) == {"sede", "data_", "train.batch_size", "train.epochs", "train.extra.adam_beta3", "run_name"}


def test_a_rule_about_a_value_that_is_wrong_itself_is_left_out(refusals):
    (problem,) = refusals("train: {batch_size: 5, effective_batch_size: many}\n")
    assert problem.where.endswith("effective_batch_size")


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("seed: 3\nrun_name: TOKEN\n", "run.yaml:2 run_name"),
        ("train:\n  extra:\n    report: [a, 'https://user:TOKEN@huggingface.co']\n", "run.yaml:3 train.extra.report.1"),
    ],
)
def test_a_token_of_the_hub_is_refused_in_any_key_and_never_shown(refusals, text, place):
    token = "hf_" + "aB3" * 11
    problems = refusals(text.replace("TOKEN", token), f"tuning.mode={token}")
    (command, *_), (problem,) = [
        [each for each in problems if "holds a token" in each.what and each.where.startswith(start)]
        for start in ("command line", "run.yaml")
    ]
    assert (command.where, problem.where) == ("command line tuning.mode", place)
    assert "HF_TOKEN" in problem.fix
    assert not any(token in str(each) for each in problems)


@pytest.mark.contract
@pytest.mark.parametrize("word", ["\udcff=1", "model.\udcff=1", "a\udcff.b=1"])
def test_an_override_whose_key_is_half_of_a_character_is_refused_by_name(word: str):
    with pytest.raises(ConfigError) as refusal:
        load_config(Path(__file__).parents[2] / "configs" / "run_lora.yaml", [word])
    assert "called" in refusal.value.what
