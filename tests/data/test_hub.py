"""Rows of the hub, from a data set made here; nothing is fetched."""

from __future__ import annotations

from typing import Any

import datasets
import pytest
from datasets.exceptions import DatasetGenerationError

from sftplay.data.cache import content_digest
from sftplay.data.read import read_rows
from sftplay.data.records import Source
from sftplay.errors import DataError

ROWS = [
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "id": None},
    {"messages": [{"role": "user", "content": "c", "name": "d"}], "id": 2},
]


def test_rows_come_numbered_without_the_null_fields_that_arrow_adds(monkeypatch: pytest.MonkeyPatch):
    made = datasets.Dataset.from_list(ROWS)
    assert made[0]["messages"][0]["name"] is None  # arrow gives every message the fields of all
    monkeypatch.setattr(datasets, "load_dataset", lambda name, subset, split: made)
    assert list(read_rows("org/name")) == [(Source("org/name", 1), ROWS[0]), (Source("org/name", 2), ROWS[1])]


def test_digest_follows_the_rows(monkeypatch: pytest.MonkeyPatch):
    made = [datasets.Dataset.from_list(rows) for rows in (ROWS, ROWS, ROWS[:1])]
    monkeypatch.setattr(datasets, "load_dataset", lambda name, subset, split: made.pop(0))
    first, same, other = (content_digest("org/name") for _ in range(3))
    assert first == same != other


@pytest.mark.parametrize("failure", [ConnectionError("offline"), ValueError(""), DatasetGenerationError("bad\nrows")])
def test_data_set_that_cannot_be_loaded_is_a_data_error(monkeypatch: pytest.MonkeyPatch, failure: Exception):
    def fail(*_: Any, **__: Any) -> None:
        raise failure

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(DataError, match="cannot be loaded") as refusal:
        list(read_rows("org/name"))
    assert "\n" not in refusal.value.what
