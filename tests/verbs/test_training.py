"""What may differ between a run and its continuation."""

from __future__ import annotations

from sftplay.config.schema import DataConfig, ModelConfig, RunConfig
from sftplay.verbs.training import find_changes


def config(**data: object) -> RunConfig:
    return RunConfig(model=ModelConfig(name="a"), data=DataConfig(train_path="b", **data))  # type: ignore[arg-type]


def test_other_held_out_rows_are_no_other_run_unless_they_decide_what_is_trained():
    assert find_changes(config(val_path="c"), config(val_path="d")) == []
    before, after = config(val_path="c", leaks="drop"), config(val_path="d", leaks="drop")
    assert find_changes(before, after) == [("data.val_path", "c", "d")]


def test_whatever_changes_the_rows_makes_another_run():
    changes = {"system": "x", "columns": {"question": "q"}, "encoding": "cp1252", "duplicates": "drop"}
    for key, value in changes.items():
        assert len(find_changes(config(), config(**{key: value}))) == 1, key
