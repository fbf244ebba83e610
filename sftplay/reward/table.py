"""The rewards that the kit ships, in one table: what each is called in a config, and what it judges."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from sftplay.config.schema.reward import CODE_TESTS
from sftplay.config.schema.run import RewardConfig, RunConfig
from sftplay.errors import ConfigError, nearest_names
from sftplay.reward.user_function import is_user_function

Judges = Literal["content", "form"]


@dataclass(frozen=True, slots=True)
class Shipped:
    """A reward of the kit."""

    module: str
    function: str
    judges: Judges
    """content: only a right answer scores. form: any answer of the right shape does."""

    columns: tuple[str, ...] = ()
    """Columns of the rows that it reads."""

    needs: tuple[str, ...] = ()
    """Options that must be given."""

    options: tuple[str, ...] = ()
    """Options that may be given."""

    values: Mapping[str, Collection[str]] = field(default_factory=dict)
    """What an option may be, for those that are one word out of a few."""


FORMS = ("code_block", "reasoning", "answer_tag", "boxed", "hashes")

SHIPPED = {
    "format": Shipped("form_rewards", "has_form", "form", options=("form",), values={"form": FORMS}),
    "syntax": Shipped("form_rewards", "is_code", "form", columns=("entry_point",)),
    "length": Shipped("form_rewards", "has_length", "form", needs=("most",), options=("least",)),
    "overlong": Shipped("form_rewards", "not_overlong", "form", needs=("most", "soft")),
    "repetition": Shipped("form_rewards", "not_repetitive", "form", options=("words",)),
    "exact_match": Shipped("text_rewards", "exact_match", "content", ("answer",), options=("after", "ignore_case")),
    "regex": Shipped("text_rewards", "matches", "form", needs=("pattern",), options=("whole",)),
    "json_schema": Shipped("text_rewards", "fits_schema", "form", needs=("schema",)),
    CODE_TESTS: Shipped(
        "code_rewards",
        "passes_tests",
        "content",
        ("tests",),
        options=("mode", "shown_weight"),
        values={"mode": ("fraction", "all")},
    ),
    "math": Shipped("math_rewards", "solves", "content", ("answer",), options=("fallback",)),
}
"""Name in a config -> reward."""


def judges_form(reward: RewardConfig) -> bool:
    """True for a reward that scores any answer of the right shape."""
    known = SHIPPED[reward.use].judges if reward.use in SHIPPED else "content"
    return (reward.judges or known) == "form"


def missing_column(reward: RewardConfig, columns: Collection[str]) -> str:
    """A column that a shipped reward reads and that is neither among these nor in its options; empty if there is none.

    What a function of the user's reads is not known.
    """
    wanted = SHIPPED[reward.use].columns if reward.use in SHIPPED else ()
    return next((name for name in wanted if name not in columns and name not in reward.options), "")


def reward_problems(cfg: RunConfig) -> Iterator[ConfigError]:
    """What is wrong with the names and options of `rewards`. A user's function is not imported here."""
    for number, reward in enumerate(cfg.rewards):
        key = f"rewards.{number}"
        if is_user_function(reward.use):
            continue
        if reward.use not in SHIPPED:
            near = nearest_names(reward.use, list(SHIPPED))
            fix = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(SHIPPED)}, and path.py:function"
            where = f"{cfg.origins.get(f'{key}.use', 'default')} {key}.use"
            yield ConfigError(f"there is no reward {reward.use!r}", where=where, fix=fix, nearest=near)
            continue
        yield from _option_problems(reward, key=key, where=f"{cfg.origins.get(f'{key}.use', 'default')} {key}.options")


def _option_problems(reward: RewardConfig, *, key: str, where: str) -> Iterator[ConfigError]:
    shipped = SHIPPED[reward.use]
    known = [*shipped.needs, *shipped.options, *shipped.columns]
    for name in reward.options:
        if name not in known:
            near = nearest_names(name, known)
            fix = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(known) or 'none'}"
            yield ConfigError(f"the reward {reward.use} has no option {name!r}", where=where, fix=fix, nearest=near)
    for name in shipped.needs:
        if name not in reward.options:
            what = f"the reward {reward.use} needs the option {name}"
            yield ConfigError(what, where=where, fix=f"write {key}.options: {{{name}: ...}}")
    for name, values in shipped.values.items():
        if (value := reward.options.get(name)) is not None and value not in values:
            near = nearest_names(str(value), list(values))
            fix = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(values)}"
            yield ConfigError(f"{name} of the reward {reward.use} is {value!r}", where=where, fix=fix, nearest=near)
