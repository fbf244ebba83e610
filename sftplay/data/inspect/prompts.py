"""Prompts in the form of examples, so that they are shown as rows of other tasks are: all of them is only read."""

from __future__ import annotations

from sftplay.data.pipeline import Examples
from sftplay.data.prepare.policies import Side
from sftplay.data.prompts.load import Prompts
from sftplay.data.prompts.questions import Questions
from sftplay.data.records import IGNORE_INDEX


def as_examples(prompts: Prompts) -> Examples:
    """The prompts of both sides with labels that learn nothing."""
    sides: dict[Side, Questions] = {"train": prompts.train, "held_out": prompts.held_out}
    asked = {
        side: questions.rows.select_columns(["row", "input_ids"]).map(
            lambda row: {"labels": [IGNORE_INDEX] * len(row["input_ids"])}, keep_in_memory=True
        )
        for side, questions in sides.items()
    }
    return Examples(
        train=asked["train"],
        held_out=asked["held_out"] if len(prompts.held_out) else None,
        held_out_chats=[],
        renderer=prompts.renderer,
        report=prompts.report,
        places={side: questions.rows.select_columns(["path", "line", "record"]) for side, questions in sides.items()},
    )
