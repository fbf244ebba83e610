"""The base of every section of the config, the types of its values, its broken rules, and what a task says of it."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from sftplay.errors import ConfigError

if TYPE_CHECKING:
    from sftplay.config.run import RunConfig

Auto = Literal["auto"]
Share = Annotated[float, Field(ge=0.0, lt=1.0)]
Positive = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
NotNegative = Annotated[float, Field(ge=0.0)]
WITH_HOME = AfterValidator(os.path.expanduser)
UserPath = Annotated[str, WITH_HOME]
"""A path, or a name instead of one. `~` becomes the user's home folder, as in a shell."""


class Section(BaseModel):
    """Part of the config: it is frozen, refuses keys that are not listed, and converts no value silently."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )


@dataclass(frozen=True)
class Problem:
    """A rule that is broken: the keys it looked at (the first is where it is reported), what, and one action."""

    keys: tuple[str, ...]
    what: str
    fix: str = field(kw_only=True)
    nearest: tuple[str, ...] = field(default=(), kw_only=True)

    def as_error(self, cfg: RunConfig) -> ConfigError:
        """Return the problem as an error at the place where `key_in` was written."""
        key = self.key_in(cfg)
        where = f"{cfg.origins[key]} {key}" if key in cfg.origins else key
        return ConfigError(self.what, where=where, fix=self.fix, nearest=self.nearest)

    def key_in(self, cfg: RunConfig) -> str:
        """Return the key to report it at: the first one that was written down."""
        return next((key for key in self.keys if key in cfg.origins), self.keys[0])


class TaskSpec:
    """A task without torch. Its `spec.py` holds one as SPEC where it differs from supervised fine-tuning."""

    def broken_rules(self, cfg: RunConfig) -> Iterator[Problem]:
        """Yield every rule of the task that the config breaks."""
        yield from ()

    def idle_keys(self, cfg: RunConfig) -> Iterator[tuple[str, str, str]]:
        """Yield keys without effect: key, the key that takes its effect away, and why."""
        yield from ()

    def list_inputs(self, cfg: RunConfig) -> list[str]:
        """Return the task's own keys that name files, folders or models."""
        return []

    def check_input(self, cfg: RunConfig, key: str, *, where: str) -> None:
        """Raise the error about what a key of `list_inputs` names: it is not there, or not sound."""

    def start_from(self, cfg: RunConfig) -> str | None:
        """Return the file of weights that a model without text starts from; None where it starts from its seed."""
        return None

    def step_multiple(self, cfg: RunConfig) -> int:
        """Count the rows that a step must hold whole: the effective batch is a multiple of it."""
        return 1

    def refuse_broken_groups(self, cfg: RunConfig, world_size: int) -> None:
        """Check that so many processes sample whole groups of answers.

        Raises:
            ConfigError: they do not; the nearest effective batches and sizes of a group are named.
        """

    def near_batches(self, cfg: RunConfig, unit: int, *, is_fixed: bool = False) -> list[int]:
        """Return the effective batches nearest to the one asked for that are multiples of `unit` and hold whole groups.

        With `is_fixed` sizes decide it, so that `unit` itself is the only one.
        """
        groups = self.step_multiple(cfg)
        if is_fixed:
            return [unit] if unit % groups == 0 else []
        step, total = math.lcm(unit, groups), cfg.train.effective_batch_size
        low = total // step * step
        return [size for size in (low, low + step) if size]


def find_spec(cfg: RunConfig) -> TaskSpec:
    """Return the spec of the config's task, imported only now."""
    part = cfg.task.part("spec")
    return cast("TaskSpec", part.SPEC) if part else TaskSpec()
