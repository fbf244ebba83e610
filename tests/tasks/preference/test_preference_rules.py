"""What the tasks of preferences refuse, and which of their keys have no effect."""

from __future__ import annotations

from pathlib import Path

import pytest

from sftplay.config.load import load_config, notes
from sftplay.errors import ConfigErrors, SeveralErrors
from sftplay.runs.inputs import load_checked

HEAD = "model: {name: builtin:tiny}\ndata: {train_path: rows.jsonl}\n"


def load(folder: Path, text: str):
    path = folder / "run.yaml"
    path.write_text(HEAD + text)
    return load_config(path)


REFUSED = {
    "task_mode: dpo\npreference: {loss: robust}": (
        "preference.loss",
        "robust expects a share of the labels to be swapped, and that share is 0",
        "write preference.label_smoothing: 0.1, or preference.loss: sigmoid",
    ),
    "task_mode: dpo\npreference: {loss: hinge, label_smoothing: 0.2}": (
        "preference.label_smoothing",
        "0.2, but hinge has no place for labels that are swapped",
        "preference.loss: sigmoid or robust",
    ),
    "task_mode: dpo\npreference: {reference: strat}": (
        "preference.reference",
        "'strat' is neither start, adapter_off nor none",
        "did you mean 'start'? A folder of that name is written ./strat",
    ),
    "task_mode: ipo\npreference: {reference: adapter_off}\ntuning: {mode: full}": (
        "preference.reference",
        "there is no adapter to switch off",
        "write preference.reference: start, or tuning.mode: lora",
    ),
    "task_mode: kto\npreference: {reference: none}": (
        "preference.reference",
        "kto weighs an answer by how much likelier it became",
        "write preference.reference: start, or task_mode: dpo or simpo",
    ),
    "task_mode: dpo\npreference: {reference: ./other}\ntuning: {new_tokens: {path: terms.txt}}": (
        "preference.reference",
        "./other has no rows for the tokens of tuning.new_tokens",
        "write preference.reference: start",
    ),
    "task_mode: orpo\ntrain: {packing: true}": ("train.packing", "answers already share a row", "train.packing: false"),
    "task_mode: simpo\ntrain: {loss_head: liger}": ("train.loss_head", "compared by their sums", "loss_head: auto"),
    "task_mode: kto\ntrain: {neftune_alpha: 5}": ("train.neftune_alpha", "the noise would enter", "alpha: null"),
    "task_mode: reward_model\ntrain: {extra: {label_smoothing_factor: 0.1}}": (
        "train.extra.label_smoothing_factor",
        "a score has none",
        "write train.extra.label_smoothing_factor: 0",
    ),
    "task_mode: orpo\ntrain: {extra: {label_smoothing_factor: 0.1}}": (
        "train.extra.label_smoothing_factor",
        "it smooths the labels of tokens",
        "remove it; preference.label_smoothing smooths those of pairs, in task_mode dpo",
    ),
    "task_mode: dpo\ntuning: {backend: unsloth}": ("tuning.backend", "unsloth is not offered", "backend: bnb"),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_a_loss_cannot_do_is_refused_with_what_to_write(text: str, tmp_path: Path):
    key, what, fix = REFUSED[text]
    with pytest.raises(ConfigErrors) as caught:
        load(tmp_path, text)
    (problem,) = caught.value.problems
    assert problem.where.endswith(f" {key}")
    assert what in problem.what
    assert fix in problem.fix


@pytest.mark.parametrize("task", ["orpo", "reward_model"])
def test_a_layout_of_other_rows_is_refused_where_it_was_written(task: str, tmp_path: Path):
    (tmp_path / "run.yaml").write_text(f"{HEAD}task_mode: {task}")
    with pytest.raises(ConfigErrors) as caught:
        load_config(tmp_path / "run.yaml", ["data.format=messages"])
    (problem,) = caught.value.problems
    assert (problem.where, problem.fix) == ("command line data.format", "write data.format: auto")


def test_a_reference_that_is_not_there_is_named_with_all_other_problems(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text(f"{HEAD}task_mode: dpo\npreference: {{reference: ./nowhere}}")
    with pytest.raises(SeveralErrors) as caught:
        load_checked(str(path))
    assert [problem.where.split()[-1] for problem in caught.value.problems] == [
        "preference.reference",
        "data.train_path",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "task_mode: dpo\npreference: {reference: none}",
        "task_mode: ipo\npreference: {reference: none}",
        "task_mode: dpo\npreference: {reference: adapter_off}\ntuning: {mode: qlora}",
        "task_mode: dpo\npreference: {reference: org/model}",
        "task_mode: dpo\npreference: {loss: robust, label_smoothing: 0.1}",
        "task_mode: orpo\npreference: {reference: adapter_off}\ntuning: {mode: full}",  # orpo has no reference
        "task_mode: dpo\ntrain: {best_metric: loss, early_stopping: 2}\neval: {before: true}",
        "task_mode: dpo\ntrain: {batching: tokens}",
    ],
)
def test_what_a_loss_can_do_is_accepted(text: str, tmp_path: Path):
    assert load(tmp_path, text).task_mode in text


IDLE = {
    "dpo": ("preference.gamma", "preference.desirable_weight", "preference.undesirable_weight"),
    "ipo": ("preference.loss", "preference.label_smoothing", "preference.gamma"),
    "kto": ("preference.loss", "preference.rpo_alpha"),
    "orpo": ("preference.reference", "preference.rpo_alpha"),
    "simpo": ("preference.reference", "preference.loss", "preference.desirable_weight"),
}
VALUES = {
    "loss": "hinge", "label_smoothing": 0.1, "reference": "adapter_off", "rpo_alpha": 1, "gamma": 0.5,
    "desirable_weight": 2, "undesirable_weight": 2,
}  # fmt: skip


@pytest.mark.parametrize("task", IDLE)
def test_a_key_of_another_loss_is_named_once_as_without_effect(task: str, tmp_path: Path):
    keys = ", ".join(f"{key.partition('.')[2]}: {VALUES[key.partition('.')[2]]}" for key in IDLE[task])
    said = notes(load(tmp_path, f"task_mode: {task}\npreference: {{{keys}, beta: 0.3}}\neval: {{metrics: [chrf]}}"))
    named = [line.split(" has no effect")[0].split()[-1] for line in said]
    assert sorted(named) == sorted([*IDLE[task], "eval.metrics"])


def test_the_section_has_no_effect_in_another_task(tmp_path: Path):
    said = notes(load(tmp_path, "task_mode: sft\npreference: {beta: 0.3}"))
    assert [line for line in said if "preference.beta has no effect: task_mode sft compares no answers" in line]


def test_tasks_that_read_an_idle_key_are_listed_as_in_a_sentence(tmp_path: Path):
    said = " ".join(notes(load(tmp_path, "task_mode: orpo\npreference: {reference: none, rpo_alpha: 1, gamma: 2}")))
    assert "only dpo, ipo and kto read it" in said
    assert "only dpo and ipo read it" in said
    assert "only simpo reads it" in said


@pytest.mark.parametrize("task", ["dpo", "kto", "reward_model"])
def test_dropout_of_an_adapter_that_is_written_down_is_named_as_it_drops_nothing(task: str, tmp_path: Path):
    written = f"task_mode: {task}\ntuning: {{mode: lora, lora: {{dropout: 0.1}}}}"
    said = notes(load(tmp_path, written))
    assert [line for line in said if "tuning.lora.dropout has no effect" in line]
