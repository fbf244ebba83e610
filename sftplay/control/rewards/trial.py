"""The first rows of a config as cases for its rewards, and the trial of the rewards before a run learns from them."""

from __future__ import annotations

from contextlib import suppress
from itertools import islice
from typing import Any

from sftplay import log
from sftplay.config.schema.run import RunConfig
from sftplay.data.layouts.convert import reading_of
from sftplay.data.prompts.prompt import columns_of, to_prompt
from sftplay.data.read.sources import dialect_of, read_rows
from sftplay.data.records import Refused
from sftplay.errors import DataError
from sftplay.reward.check import TRIED_ROWS, check_before_training
from sftplay.reward.junk import Case
from sftplay.reward.reward_set import RewardSet


def try_rewards(cfg: RunConfig) -> None:
    """Refuse to learn from rewards that cannot tell right answers from junk, before a model is opened.

    A control replaces the rewards, so there is nothing to try. Raises what `check_before_training` raises.
    """
    if cfg.task_mode != "grpo" or cfg.grpo.control is not None:
        return
    log.status("trying the rewards on right answers and on junk", "reward")
    rows = [columns for columns in _first_rows(cfg, TRIED_ROWS) if columns is not None]
    with RewardSet(cfg) as rewards:
        check_before_training(cfg, rows, rewards=rewards)


def read_cases(cfg: RunConfig, n: int) -> list[Case]:
    """The first `n` rows that can be read, each with its right answer and its columns.

    Raises:
        DataError: fewer than two rows have an answer.
    """
    rows = _first_rows(cfg, n)
    cases = [Case(row["answer"], row) for row in rows if row and isinstance(row.get("answer"), str)]
    n_left_out = len(rows) - len(cases)
    if n_left_out:
        log.say(f"note: {n_left_out:,} of the first {n} rows cannot be read, or have no answer: left out", "reward")
    if len({case.gold for case in cases}) < 2:
        what = f"the first {n} rows hold fewer than two different answers"
        raise DataError(what, where=cfg.rows_path, fix="name rows with a prompt and an answer, or raise N")
    return cases


def _first_rows(cfg: RunConfig, n: int) -> list[dict[str, Any] | None]:
    """What rewards read of the first `n` rows; None for one that cannot be read."""
    reading, rows = reading_of(cfg.data), []
    for number, (source, row) in enumerate(islice(read_rows(cfg.rows_path, dialect_of(cfg.data)), n)):
        columns = None
        if not isinstance(row, Refused):
            with suppress(DataError):
                prompt = to_prompt(row, source, number=number, reading=reading)
                columns = columns_of(prompt.row, source, reading=reading)
        rows.append(columns)
    return rows
