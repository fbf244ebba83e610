"""What the trunk asks a task before torch is imported. The answers here are those of supervised fine-tuning."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import cast

from sftplay.config.rules.problem import Problem
from sftplay.config.schema.run import RunConfig


class TaskSpec:
    """A task without torch. Its `spec.py` holds one as SPEC where it differs."""

    def broken_rules(self, cfg: RunConfig) -> Iterator[Problem]:
        """Yield every rule of the task that the config breaks."""
        yield from ()

    def idle_keys(self, cfg: RunConfig) -> Iterator[tuple[str, str, str]]:
        """Yield keys without effect: key, the key that takes its effect away, and why."""
        yield from ()

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
    """Find the spec of the config's task, imported only now."""
    part = cfg.task.part("spec")
    return cast("TaskSpec", part.SPEC) if part else TaskSpec()
