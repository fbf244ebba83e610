"""The table of rewards, functions of users, and the values that rewards give."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_type_hints

from sftplay.errors import ConfigError, nearest_names, suggest

if TYPE_CHECKING:
    from sftplay.config.data import RewardConfig
    from sftplay.config.run import RunConfig

RewardFunction = Callable[..., list[float | None]]


@dataclass(frozen=True, slots=True)
class RewardValues:
    """The values of one reward for a batch of completions."""

    values: list[float | None]
    """A number for each completion. None: nothing is known."""

    reasons: list[str] = field(default_factory=list)
    """Why values are None, each reason once."""

    verdicts: Sequence[dict[str, Any]] = ()
    """What became of each completion's program; empty for a reward that runs none."""


def is_user_function(name: str) -> bool:
    """Say whether a name has the form of a user's function."""
    return ":" in name


def load_function(name: str, *, where: str = "rewards") -> RewardFunction:
    """Import the function behind `module:function` or `path.py:function`, and with it the user's module. Raise
    ConfigError where there is no such file, module or function, or importing it fails.
    """
    place, _, function_name = name.rpartition(":")
    try:
        if place.endswith(".py"):
            path = Path(place)
            if not path.is_file():
                raise FileNotFoundError(f"no file {str(path)!r}")
            module = import_file(path)
        else:
            module = import_module(place)
    except Exception as error:
        what = f"{place!r} cannot be imported: {type(error).__name__}: {error}"
        fix = "name a Python file (path.py:function) or an installed module"
        raise ConfigError(what, where=where, fix=fix) from error
    found = getattr(module, function_name, None)
    if not callable(found):
        known = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        fix = f"it has {', '.join(known) or 'no function at all'}"
        raise ConfigError(f"{place!r} has no function {function_name!r}", where=where, fix=fix)
    return found


def import_file(path: Path) -> ModuleType:
    """Import a user's file, once in a process: several functions of it share its variables."""
    name = f"sftplay_user_{path.stem}_{zlib.crc32(os.fsencode(path.resolve())):08x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look modules up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@dataclass(frozen=True, slots=True)
class Shipped:
    """A reward of the kit."""

    module: str
    function: str
    judges: Literal["content", "form"]
    """content: only a right answer scores. form: any answer of the right shape does."""

    columns: tuple[str, ...] = ()
    """Columns of the rows that it reads."""

    needs: tuple[str, ...] = ()
    """Options that must be given."""

    options: tuple[str, ...] = ()
    """Options that may be given."""

    counts_tokens: bool = False
    """Whether it gets the tokens of the completions, as `completion_ids`."""

    is_opened: bool = False
    """True where the function, called with the options once, opens what then scores a batch at a time."""

    def load(self) -> RewardFunction:
        """Import the function. The types of its parameters say what options may be."""
        return getattr(import_module(f"sftplay.reward.{self.module}"), self.function)


ENVIRONMENT_REWARD = "environment_reward"
"""The column with the sum of what an environment gave in the turns of a completion."""

SHIPPED = {
    "format": Shipped("text_rewards", "has_form", "form", options=("form",)),
    "syntax": Shipped("text_rewards", "is_code", "form", columns=("entry_point",)),
    "length": Shipped("text_rewards", "has_length", "form", needs=("most",), options=("least",), counts_tokens=True),
    "overlong": Shipped("text_rewards", "not_overlong", "form", needs=("most", "soft"), counts_tokens=True),
    "repetition": Shipped("text_rewards", "not_repetitive", "form", options=("words",)),
    "exact_match": Shipped("text_rewards", "exact_match", "content", ("answer",), options=("after", "ignore_case")),
    "regex": Shipped("text_rewards", "matches", "form", needs=("pattern",), options=("whole",)),
    "json_schema": Shipped("text_rewards", "fits_schema", "form", needs=("schema",)),
    "code_tests": Shipped("code_rewards", "passes_tests", "content", ("tests",), options=("mode", "shown_weight")),
    "model": Shipped("model_reward", "open_scorer", "content", options=("max_tokens",), is_opened=True),
    "environment": Shipped("text_rewards", "of_environment", "content", (ENVIRONMENT_REWARD,)),
    "math": Shipped("math_rewards", "solves", "content", ("answer",), options=("fallback",)),
}
"""Name in a config -> reward."""


def judges_form(reward: RewardConfig) -> bool:
    """Say whether a reward scores any answer of the right shape."""
    known = SHIPPED[reward.use].judges if reward.use in SHIPPED else "content"
    return (reward.judges or known) == "form"


def has_full_value(reward: RewardConfig) -> bool:
    """Say whether only a right answer gets a reward's full 1. A model's score has no full value."""
    is_score = reward.use in SHIPPED and SHIPPED[reward.use].is_opened
    return not is_score and not judges_form(reward)


def missing_column(reward: RewardConfig, columns: Collection[str]) -> str:
    """Find a column that a shipped reward reads and that is neither among these nor in its options; empty if none is.

    What a function of the user's reads is not known.
    """
    wanted = SHIPPED[reward.use].columns if reward.use in SHIPPED else ()
    return next((name for name in wanted if name not in columns and name not in reward.options), "")


def reward_problems(cfg: RunConfig) -> Iterator[ConfigError]:
    """Yield what is wrong with the names and options of `rewards`. A user's function is not imported here."""
    for number, reward in enumerate(cfg.rewards):
        key = f"rewards.{number}"
        where = f"{cfg.origins.get(f'{key}.use', 'default')} {key}"
        if reward.use in SHIPPED:
            yield from _option_problems(reward, key=key, where=f"{where}.options")
            yield from _path_problems(reward, cfg, where=f"{cfg.origins.get(f'{key}.path', where)} {key}.path")
        elif not is_user_function(reward.use):
            fix, near = suggest(reward.use, list(SHIPPED), f"there are {', '.join(SHIPPED)}, and path.py:function")
            yield ConfigError(f"there is no reward {reward.use!r}", where=f"{where}.use", fix=fix, nearest=near)


def _path_problems(reward: RewardConfig, cfg: RunConfig, *, where: str) -> Iterator[ConfigError]:
    shipped = SHIPPED[reward.use]
    if shipped.is_opened and reward.path is not None:
        try:
            import_module(f"sftplay.reward.{shipped.module}").find_score_model(reward.path, cfg.output_dir)
        except ConfigError as error:
            yield ConfigError(error.what, where=where, fix=error.fix)


def _option_problems(reward: RewardConfig, *, key: str, where: str) -> Iterator[ConfigError]:
    from pydantic import TypeAdapter, ValidationError  # not in the process of a reward, which starts faster without

    shipped = SHIPPED[reward.use]
    known = [*shipped.needs, *shipped.options, *shipped.columns]
    for name in reward.options:
        if name not in known:
            fix, near = suggest(name, known, f"it takes {', '.join(known) or 'none'}")
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
            words = [word for word in get_args(types[name]) if isinstance(word, str)]
            near, first = nearest_names(str(value), words), error.errors()[0]
            kinds = {"int_type": "a whole number", "string_type": "a text", "bool_type": "true or false"}
            fix = f"write {kinds.get(first['type'], 'what docs/rewards.md says')}"
            if words:
                fix = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(words)}"
            elif first["type"] == "greater_than_equal":
                fix = f"write {first['ctx']['ge']:g} or more"
            elif first["type"] == "value_error":
                fix = f"mend it: {first['ctx']['error']}"
            yield ConfigError(f"{name} of the reward {reward.use} is {value!r}", where=where, fix=fix, nearest=near)
