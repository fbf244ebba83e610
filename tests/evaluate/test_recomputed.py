"""The rewards of kept completions once more: what agrees, what differs and where, and what cannot be compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from sftplay.data.load_prompts import Questions
from sftplay.errors import DataError
from sftplay.evaluate.recomputed import Recomputed, kept_steps, recompute
from sftplay.reward.calls import RewardValues
from sftplay.reward.reward_set import BatchRewards


@pytest.mark.parametrize(
    ("then", "now", "differs"),
    [(0.5, 0.5, False), (1 / 3, 1 / 3 + 1e-9, False), (1.0, 0.0, True), (None, None, False), (None, 0.0, True),
     (1.0, None, True)],
)  # fmt: skip
def test_a_value_differs_where_it_is_another_one_or_no_longer_known(then: Any, now: Any, differs: bool):
    found = Recomputed("r")
    found.add("file:1", then, now=now)
    assert (found.n, bool(found.differ), bool(found.first)) == (1, differs, differs)


class Lengths:
    """Stands for an opened RewardSet: an answer is worth its length, where its row allows that."""

    names = ("length",)

    def score(self, completions: list[str], columns: dict[str, list[Any]]) -> BatchRewards:
        worth = [float(len(text)) if best else 0.0 for text, best in zip(completions, columns["counts"], strict=True)]
        return BatchRewards({"length": RewardValues(worth)}, [None] * len(completions))


def questions() -> Questions:
    """Rows 4 and 7 of a file, of which the others were dropped."""
    content = [json.dumps({"question": "q", "columns": {"counts": row == 7}}) for row in (4, 7)]
    return Questions(Dataset.from_dict({"row": [4, 7], "input_ids": [[1], [2]], "content": content}))


def kept(folder: Path, step: int, lines: list[dict[str, Any]]) -> None:
    (folder / "samples").mkdir(exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "samples" / f"step-{step}.jsonl").write_text(text)


def line(row: int, text: str, value: float | None) -> dict[str, Any]:
    return {"prompt_id": row, "completion": text, "rewards": {"length": value}}


def again(folder: Path) -> list[Recomputed]:
    rewards: Any = Lengths()
    return recompute(kept_steps(folder), questions(), columns=["counts"], reward_set=rewards)


def test_each_completion_is_judged_with_the_columns_of_its_own_row(tmp_path: Path):
    kept(tmp_path, 2, [line(7, "abc", 3.0), line(4, "abc", 0.0)])
    kept(tmp_path, 10, [line(4, "ab", 0.0)])
    assert again(tmp_path) == [Recomputed("length", n=3)]


def test_the_first_completion_that_got_something_else_is_named(tmp_path: Path):
    kept(tmp_path, 10, [line(7, "abc", 1.0)])
    kept(tmp_path, 9, [line(7, "abc", 3.0), line(7, "abcd", 3.5)])
    (found,) = again(tmp_path)
    assert (found.n, found.differ, found.largest_difference) == (3, 2, 2.0)
    assert found.first == f"{tmp_path}/samples/step-9.jsonl:2 got 3.5, now 4.0"


def test_a_broken_line_or_a_prompt_that_has_gone_is_named(tmp_path: Path):
    kept(tmp_path, 1, [line(5, "abc", 3.0)])
    with pytest.raises(DataError, match=r"the prompt 5 is not in the data"):
        again(tmp_path)
    (tmp_path / "samples" / "step-1.jsonl").write_text("{}\nnonsense\n")
    with pytest.raises(DataError, match="cannot be read") as error:
        again(tmp_path)
    assert error.value.where.endswith("step-1.jsonl:2")
