"""Rules about rewards and the box in which programs run."""

from __future__ import annotations

from collections.abc import Iterator

from sftplay.config.rules.problem import Problem
from sftplay.config.schema.reward import CODE_TESTS
from sftplay.config.schema.run import RunConfig
from sftplay.units import parse_bytes

LEAST_MEMORY = 64 << 20
"""Bytes that the interpreter itself needs, with room for a small program."""


def broken_reward_rules(cfg: RunConfig) -> Iterator[Problem]:
    """Limits of the sandbox that contradict each other, and deadlines that the sandbox cannot keep."""
    box = cfg.sandbox
    if box.test_timeout > box.timeout:
        what = f"one test may take {box.test_timeout:g} s, and all tests together {box.timeout:g} s"
        yield Problem(("sandbox.test_timeout", "sandbox.timeout"), what, fix="raise sandbox.timeout")
    try:
        n_bytes = parse_bytes(str(box.memory))
    except ValueError as error:
        yield Problem(("sandbox.memory",), str(error), fix="write 512MiB")
    else:
        if n_bytes < LEAST_MEMORY:
            what = f"{n_bytes:,} bytes are not enough for Python"
            yield Problem(("sandbox.memory",), what, fix="write 64MiB or more")
    for number, reward in enumerate(cfg.rewards):
        if reward.use == CODE_TESTS and reward.deadline < box.timeout:
            what = f"ends before a program has had its {box.timeout:g} s: an endless loop would never count as 0"
            keys = (f"rewards.{number}.deadline", "sandbox.timeout")
            yield Problem(keys, what, fix="raise it above sandbox.timeout, or lower sandbox.timeout")


def idle_reward_keys(cfg: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Key, the key that takes its effect away, and why: the sandbox of a run that runs no programs."""
    if not any(reward.use == CODE_TESTS for reward in cfg.rewards):
        for name in type(cfg.sandbox).model_fields:
            yield f"sandbox.{name}", f"sandbox.{name}", f"no reward uses {CODE_TESTS}"
