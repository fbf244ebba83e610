"""The rows of pairs, for the verbs that read, show and measure rows of any task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sftplay.config.run import RunConfig
from sftplay.data.files import RowFields
from sftplay.data.layouts import read_layout_options
from sftplay.data.records import Chat, Message, Record, Source
from sftplay.tasks.preference.pairs import to_pair

if TYPE_CHECKING:
    from sftplay.data.pipeline import Examples


def read_record(row: RowFields, source: Source, *, cfg: RunConfig) -> Record:
    """Return the prompt of a row with its longest side. Raise DataError where the row is no pair, or breaks a rule."""
    reading, answers = read_layout_options(cfg.data), cfg.task.takes_answers
    pair = to_pair(row, source, reading=reading, takes_answers=answers, is_plain=True)
    return max(pair.chats, key=lambda chat: sum(len(turn.content) for turn in chat.messages))


def load_examples(
    cfg: RunConfig, tokenizer: Any, *, renderer_template: str | None = None, held_out_path: str | None = None
) -> Examples:
    """Return pairs as `data.pipeline.load_examples` returns rows, or with `held_out_path` as its `load_held_out` does.

    The rows have more columns, see `load_pairs`. The held-out chats end with the chosen answer.
    """
    from sftplay.data.pipeline import Examples
    from sftplay.tasks.preference.load_pairs import load

    pairs = load(cfg, tokenizer, renderer_template=renderer_template, held_out_path=held_out_path)
    chats = {
        (str(texts.source), texts.chosen): Chat(
            (*texts.prompt, Message("assistant", texts.chosen)), texts.source, tools=texts.tools
        )
        for texts in pairs.records("held_out")
        if texts.chosen and not texts.beginning
    }
    return Examples(
        train=pairs.train,
        held_out=pairs.held_out,
        held_out_chats=list(chats.values()),
        renderer=pairs.renderer,
        report=pairs.report,
        places={side: texts.select_columns(["path", "line", "record"]) for side, texts in pairs.texts.items()},
    )


def report_table(report: Mapping[str, Any]) -> str:
    from sftplay.tasks.preference.load_pairs import pairs_table

    return pairs_table(report)
