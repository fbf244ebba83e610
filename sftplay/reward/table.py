"""The rewards that the kit ships, in one table: what each is called in a config, and what it judges."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Literal, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError

from sftplay.config.rewards import CODE_TESTS, RewardConfig
from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError, nearest_names
from sftplay.reward.user_function import RewardFunction, is_user_function

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

    def load(self) -> RewardFunction:
        """The function. The types of its parameters say what options may be."""
        function: RewardFunction = getattr(import_module(f"sftplay.reward.{self.module}"), self.function)
        return function


SHIPPED = {
    "format": Shipped("form_rewards", "has_form", "form", options=("form",)),
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
    types = get_type_hints(shipped.load(), include_extras=True)
    for name, value in reward.options.items():
        if name not in known or name in shipped.columns:
            continue
        try:
            TypeAdapter(types[name]).validate_python(value, strict=True)
        except ValidationError as error:
            words = [each for each in get_args(types[name]) if isinstance(each, str)]
            near = nearest_names(str(value), words)
            fix = f"did you mean {near[0]!r}?" if near else _wanted(error, words)
            yield ConfigError(f"{name} of the reward {reward.use} is {value!r}", where=where, fix=fix, nearest=near)


def _wanted(error: ValidationError, words: Sequence[str]) -> str:
    """What to write in place of a value that was refused; `words` are the choices, if there are some."""
    first = error.errors()[0]
    kinds = {"int_type": "a whole number", "string_type": "a text", "bool_type": "true or false"}
    if words:
        return f"there are {', '.join(words)}"
    if first["type"] == "greater_than_equal":
        return f"write {first['ctx']['ge']:g} or more"
    if first["type"] == "value_error":
        return f"mend it: {first['ctx']['error']}"
    return f"write {kinds.get(first['type'], 'what docs/rewards.md says')}"
