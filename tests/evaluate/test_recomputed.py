"""The rewards of kept completions once more: what agrees, what differs and where, and what cannot be compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
from datasets import Dataset

from sftplay.data.load_prompts import Questions
from sftplay.errors import DataError
from sftplay.evaluate.recomputed import Recomputed, kept_steps, recompute
from sftplay.reward.reward_set import BatchRewards
from sftplay.reward.table import RewardValues


class Lengths:
    """Stands for an opened RewardSet: an answer is worth its length, where its row allows that."""

    names = ("length",)
    workers: ClassVar[dict[str, Any]] = {}

    def score(self, completions: list[str], columns: dict[str, list[Any]], *, completion_ids: Any) -> BatchRewards:
        if completion_ids is not None:
            return BatchRewards({"length": RewardValues([float(len(ids)) for ids in completion_ids])}, [None, None])
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


def test_the_first_completion_that_got_something_else_is_named(tmp_path: Path):
    kept(tmp_path, 10, [line(7, "abc", 1.0)])
    kept(tmp_path, 9, [line(7, "abc", 3.0), line(7, "abcd", 3.5)])
    (found,) = again(tmp_path)
    assert (found.n, found.differ, found.largest_difference) == (3, 2, 2.0)
    assert found.first == f"{tmp_path}/samples/step-9.jsonl:2 got 3.5, now 4.0"


def test_rewards_for_length_count_the_tokens_of_the_run_and_failed_environments_leave_nothing_known(tmp_path: Path):
    kept(tmp_path, 1, [line(7, "a b c", 9.0) | {"tokens": 9}, line(7, "", None) | {"tokens": 1, "failure": "hung"}])
    (found,) = again(tmp_path)
    assert (found.n, found.differ, found.first) == (2, 0, "")


def test_a_broken_line_or_a_prompt_that_has_gone_is_named(tmp_path: Path):
    kept(tmp_path, 1, [line(5, "abc", 3.0)])
    with pytest.raises(DataError, match=r"the prompt 5 is not in the data"):
        again(tmp_path)
    (tmp_path / "samples" / "step-1.jsonl").write_text("{}\nnonsense\n")
    with pytest.raises(DataError, match="cannot be read") as error:
        again(tmp_path)
    assert error.value.where.endswith("step-1.jsonl:2")
