"""What may differ between a run and its resume."""

from __future__ import annotations

import pytest

from sftplay.config.keys import RENAMED_KEYS, differences, values_that_decide_weights

VAL, TEST = "data.val_path=v.jsonl", "data.test_path=t.jsonl"


@pytest.mark.parametrize(
    ("before", "change", "refused"),
    [
        ([], "train.learning_rate=1e-3", ["train.learning_rate"]),
        ([], "logging.steps=7", []),
        ([], "run_name=other", []),
        # Rows that are only measured on may come from another file. Where they come from no file any more, or from one
        # for the first time, other rows are left to train on.
        ([VAL], "data.val_path=other.jsonl", []),
        ([TEST], "data.test_path=other.jsonl", []),
        ([], VAL, ["data.val_path"]),
        ([VAL], "data.val_path=null", ["data.val_path"]),
        # They decide where they choose the checkpoint, end the run, or take rows out of the training.
        ([VAL, "train.best_metric=loss"], "data.val_path=other.jsonl", ["data.val_path"]),
        ([VAL, "train.early_stopping=2"], "data.val_path=other.jsonl", ["data.val_path"]),
        ([VAL, "data.contamination=drop"], "data.val_path=other.jsonl", ["data.val_path"]),
    ],
)
def test_what_changes_neither_rows_nor_weights_may_differ(load, before, change, refused):
    old, new = (values_that_decide_weights(load("", *overrides)) for overrides in (before, [*before, change]))
    assert [key for key, _, _ in differences(old, new)] == refused


@pytest.mark.parametrize(
    ("missing", "change", "refused"),
    [
        ("cpt.cross_document", [], []),
        ("train.min_lr_ratio", [], []),
        ("datasets", [], []),
        ("tuning.lora.rslora", ["tuning.lora.rslora=true"], ["tuning.lora.rslora"]),
    ],
)
def test_a_key_that_a_run_was_begun_without_had_its_default(load, missing, change, refused):
    old = values_that_decide_weights(load(""))
    del old[missing]
    assert [key for key, _, _ in differences(old, values_that_decide_weights(load("", *change)))] == refused


def test_what_an_older_release_decided_in_a_section_that_the_task_does_not_read_is_no_change(load):
    now = values_that_decide_weights(load(""))
    assert differences({**now, "hrm.compile": False}, now) == []
    assert [key for key, *_ in differences({**now, "train.batch_size": 4}, {**now, "train.batch_size": "auto"})]


@pytest.mark.parametrize(
    ("before", "after", "refused"),
    [
        ([], [], []),
        (["data.contamination=drop"], ["data.contamination=drop"], []),
        (["data.contamination=drop"], [], [("data.contamination", "drop", "error")]),
        ([], ["cpt.on_source_end=stop"], [("cpt.on_source_end", "repeat", "stop")]),
        (["grpo.dynamic_sampling_rounds=2"], [], [("grpo.dynamic_sampling_rounds", 2, 0)]),
    ],
)
def test_what_an_older_checkpoint_says_by_an_old_name_is_compared_with_the_new_one(load, before, after, refused):
    old_names = {new: old for old, new in RENAMED_KEYS.items()}
    stored = {old_names.get(key, key): value for key, value in values_that_decide_weights(load("", *before)).items()}
    assert differences(stored, values_that_decide_weights(load("", *after))) == refused
