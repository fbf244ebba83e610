"""The section of one reward in the list `rewards`. What each shipped reward takes is in `sftplay.reward`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from sftplay.config.schema.section import PositiveFloat, Section


class RewardConfig(Section):
    """One reward: a function from completions to numbers. An entry is named on the command line by its name or its
    number, from 0: `rewards.answer.deadline=2`."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$", max_length=64)]
    """Name of the reward in logs, metrics and reports: letters, digits, `_` and `-`. Each reward has its own."""

    use: str
    """What computes it: format, syntax, length, overlong, repetition, exact_match, regex, json_schema or math; or your
    own function, as `module:function` or `path.py:function`. It gets `completions` and the columns of their rows by
    name, and returns a number for each completion, or None where nothing is known."""

    options: dict[str, Any] = Field(default_factory=dict)
    """What else the function is given, by name: `{pattern: "yes|no"}`."""

    deadline: PositiveFloat = 10.0
    """Seconds that it may take: a shipped reward for each completion, a function of yours for each batch. Then nothing
    is known of these completions: they count as None, never as 0."""
