"""`train.extra` against TRL's own fields, which are read without importing TRL."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from sftplay.config import other_kits as trl_arguments
from sftplay.config.keys import all_keys
from sftplay.config.other_kits import config_fields, config_kinds, kit_answer, read_foreign_keys
from sftplay.config.run import RunConfig
from sftplay.tasks.grpo.task import grpo_arguments

FOREIGN = read_foreign_keys()
GRPO = "task_mode: grpo\nrewards: [{name: answer, use: exact_match}]\n"
SIZED = {"model": {"name": "builtin:tiny"}, "train": {"batch_size": 4, "grad_accum": 8}}


def test_every_answer_names_a_key_that_exists():
    answers = [answer for name in config_fields("SFTConfig") if (answer := kit_answer(name))]
    assert {answer.key for answer in answers} <= {"", *all_keys()}
    assert len([answer for answer in answers if answer.key]) >= 50
    assert not set(FOREIGN.names) & set(FOREIGN.without_key)


@pytest.mark.slow
def test_the_fields_read_from_the_source_are_those_of_the_dataclasses():
    code = (
        "import dataclasses, trl\n"
        "for kind in (trl.SFTConfig, trl.GRPOConfig):\n"
        "    print(*[f.name for f in dataclasses.fields(kind) if f.init and not f.name.startswith('_')])"
    )
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    sft, grpo = ran.stdout.splitlines()
    assert config_fields("SFTConfig") == set(sft.split())
    assert config_fields("GRPOConfig") == set(grpo.split())


def test_inherited_fields_are_found():
    fields = config_fields("SFTConfig")
    assert {"adam_beta1", "label_smoothing_factor", "activation_offloading", "lr_scheduler_kwargs"} <= fields
    assert not [name for name in fields if name.startswith("_")]


def test_every_answer_to_an_argument_of_grpo_names_a_key_that_exists():
    fields = config_fields("GRPOConfig")
    answers = {name: answer for name in fields if (answer := kit_answer(name, samples=True))}
    assert {answer.key for answer in answers.values()} <= {"", *all_keys()}
    assert set(FOREIGN.without_meaning) <= fields
    # Every argument that the kit passes to GRPOConfig is answered with its key.
    assert set(grpo_arguments(RunConfig.model_validate(SIZED))) <= set(answers)


def test_the_loss_of_sft_and_that_of_grpo_are_two_keys(refusals):
    (problem,) = refusals("train: {extra: {loss_type: nll}}\n")
    assert problem.fix == "write train.loss_head"
    (problem,) = refusals(f"{GRPO}grpo: {{extra: {{loss_type: dapo}}}}\n")
    assert problem.fix == "write grpo.loss_type"


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("use_vllm", "grpo.generation"),
        ("generation_batch_size", "grpo.steps_per_generation"),
        ("multi_objective_aggregation", "grpo.aggregation"),
        ("per_device_train_batch_size", "train.batch_size"),
        ("vllm_gpu_memory_utilization", "grpo.vllm.memory_share"),
        ("temperature", "grpo.temperature"),
    ],
)
def test_an_argument_of_grpo_that_the_kit_sets_is_answered_with_our_key(refusals, name, key):
    for section in ("grpo", "train"):
        (problem,) = refusals(f"{GRPO}{section}:\n  extra: {{{name}: 1}}\n")
        assert problem.where.endswith(f"{section}.extra.{name}")
        assert problem.nearest == [key]


def test_a_field_that_only_grpo_has_is_taken_in_its_extra(load, refusals):
    assert load(f"{GRPO}grpo: {{extra: {{sapo_temperature_neg: 1.1}}}}\n").grpo.extra
    (problem,) = refusals(f"{GRPO}grpo: {{extra: {{sapo_temperature: 1.1}}}}\n")
    assert problem.what == "TRL's GRPOConfig has no field 'sapo_temperature'"
    assert "sapo_temperature_neg" in problem.nearest
    (problem,) = refusals("train: {extra: {sapo_temperature_neg: 1.1}}\n")
    assert problem.what == "TRL's SFTConfig has no field 'sapo_temperature_neg'"
    (problem,) = refusals(f"{GRPO}train: {{extra: {{adam_beta1: 0.5}}}}\ngrpo: {{extra: {{adam_beta1: 0.5}}}}\n")
    assert problem.what == "is given in train.extra too"


def test_labels_and_a_moving_reference_have_no_place_in_grpo(refusals):
    for name in FOREIGN.without_meaning:
        (problem,) = refusals(f"{GRPO}grpo: {{extra: {{{name}: 1}}}}\n")
        assert problem.fix == "remove it"


def test_the_table_of_what_the_kit_sets_holds_no_name_that_trl_never_had():
    # Names of the other supported releases, which the pinned one lacks.
    assert set(FOREIGN.without_key) - config_fields("SFTConfig") <= {"dataloader_shuffle", "group_by_length"}


@pytest.mark.parametrize(
    "name", ["bf16", "per_device_train_batch_size", "save_strategy", "logging_dir", "warmup_steps"]
)
def test_an_argument_the_kit_sets_is_answered_with_our_key(refusals, name):
    (problem,) = refusals(f"train:\n  extra:\n    {name}: 1\n")
    assert problem.where == f"run.yaml:3 train.extra.{name}"
    (key,) = problem.nearest
    assert key in all_keys()
    assert problem.what == f"the kit sets it from {key}"
    assert problem.fix.startswith(f"write {key}")


@pytest.mark.parametrize("name", ["ddp_backend", "deepspeed", "dataset_kwargs", "train_sampling_strategy", "hub_token"])
def test_an_argument_that_cannot_be_set_is_answered_with_the_reason(refusals, name):
    (problem,) = refusals(f"train: {{extra: {{{name}: 1}}}}\n")
    assert len(problem.what) > 20
    assert problem.fix == "remove it"


def test_an_unknown_argument_is_answered_with_the_nearest_one_that_may_be_given(refusals):
    (problem,) = refusals("train: {extra: {adam_beta: 0.9}}\n")
    assert "adam_beta1" in problem.nearest
    assert problem.what == "TRL's SFTConfig has no field 'adam_beta'"


def test_an_argument_on_the_command_line_is_checked_too(refusals):
    (problem,) = refusals("", "train.extra.adam_epsilom=1e-9")
    assert problem.where == "command line train.extra.adam_epsilom"
    assert problem.fix == "did you mean 'adam_epsilon'?"


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ("adam_beta1: high", "high is not a number"),
        ("adam_beta1: true", "true is not a number"),
        ("adam_beta1: .nan", ".nan is no number to train with"),
        ("torch_empty_cache_steps: 1.5", "1.5 is not a whole number or null"),
        ("tf32: 1", "1 is not true or false or null"),
        ("adam_beta1: 1", None),
        ("tf32: null", None),
        ("bf16_full_eval: true", None),
        ("hub_strategy: end", None),  # a class of transformers: what it takes is left to it
    ],
)
def test_a_value_of_another_kind_than_trl_takes_is_refused_before_anything_is_loaded(load, refusals, given, what):
    text = f"train: {{extra: {{{given}}}}}\n"
    if what is None:
        assert load(text).train.extra
    else:
        assert [problem.what for problem in refusals(text)] == [what]


def test_where_the_library_is_missing_the_check_is_left_to_the_run(load, monkeypatch):
    monkeypatch.setattr(trl_arguments, "find_spec", lambda name: None)
    config_kinds.cache_clear()
    try:
        assert load("train: {extra: {no_such_field: 1}}\n").train.extra == {"no_such_field": 1}
    finally:
        config_kinds.cache_clear()


def test_a_class_that_cannot_be_followed_leaves_the_check_to_the_run(tmp_path, monkeypatch):
    for name in ("trainer/sft_config.py", "trainer/base_config.py", "training_args.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("class SFTConfig(Elsewhere):\n    a: int = 1\n")
    package = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(trl_arguments, "find_spec", lambda name: package)
    config_kinds.cache_clear()
    try:
        assert config_fields("SFTConfig") is None
    finally:
        config_kinds.cache_clear()


def test_what_may_be_given_has_no_answer():
    assert kit_answer("adam_beta1") is None
