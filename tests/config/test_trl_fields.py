"""`train.extra` against TRL's own fields, which are read without importing TRL."""

import subprocess
import sys

import pytest

from sftplay.config.keys import all_keys
from sftplay.config.other_kits import config_fields, kit_answer, read_foreign_keys
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


def test_every_answer_to_an_argument_of_grpo_names_a_key_that_exists():
    fields = config_fields("GRPOConfig")
    answers = {name: answer for name in fields if (answer := kit_answer(name, samples=True))}
    assert {answer.key for answer in answers.values()} <= {"", *all_keys()}
    assert set(FOREIGN.without_meaning) <= fields
    # Every argument that the kit passes to GRPOConfig is answered with its key.
    assert set(grpo_arguments(RunConfig.model_validate(SIZED))) <= set(answers)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("use_vllm", "grpo.generation"),
        ("per_device_train_batch_size", "train.batch_size"),
        ("vllm_gpu_memory_utilization", "grpo.vllm.memory_share"),
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


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ("adam_beta1: high", "high is not a number"),
        ("adam_beta1: .nan", ".nan is no number to train with"),
        ("torch_empty_cache_steps: 1.5", "1.5 is not a whole number or null"),
        ("tf32: 1", "1 is not true or false or null"),
        ("tf32: null", None),
        ("hub_strategy: end", None),  # a class of transformers: what it takes is left to it
    ],
)
def test_a_value_of_another_kind_than_trl_takes_is_refused_before_anything_is_loaded(load, refusals, given, what):
    text = f"train: {{extra: {{{given}}}}}\n"
    if what is None:
        assert load(text).train.extra
    else:
        assert [problem.what for problem in refusals(text)] == [what]


@pytest.mark.parametrize(
    ("task", "name", "key"),
    [
        ("dpo", "beta", "preference.beta"),
        ("kto", "desirable_weight", "preference.desirable_weight"),
        ("dpo", "loss_type", "preference.loss"),
        ("simpo", "per_device_train_batch_size", "train.batch_size"),
    ],
)
def test_an_argument_of_trl_that_a_key_decides_is_answered_with_the_key(task: str, name: str, key: str, refusals):
    (problem,) = refusals(f"task_mode: {task}\ntrain:\n  extra: {{{name}: 1}}\n")
    assert problem.where.endswith(f"train.extra.{name}")
    assert problem.nearest == [key]


def test_arguments_that_only_trls_trainers_read_are_refused(load, refusals):
    (problem,) = refusals("task_mode: dpo\ntrain:\n  extra: {f_divergence_type: reverse_kl}\n")
    assert problem.what == "the Trainer's TrainingArguments has no field 'f_divergence_type'"
    assert load("task_mode: dpo\ntrain:\n  extra: {adam_beta2: 0.95}\n").train.extra == {"adam_beta2": 0.95}
