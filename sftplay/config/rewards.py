"""The section of one reward in the list `rewards`, and that of the box for a model's programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from sftplay.config.section import Positive, PositiveFloat, Problem, Section, UserPath
from sftplay.units import parse_bytes

if TYPE_CHECKING:
    from sftplay.config.run import RunConfig

CODE_TESTS = "code_tests"  # the reward whose programs run in the sandbox
MODEL = "model"  # the reward that a trained model gives
ENVIRONMENT = "environment"  # the reward that grpo.environment gives in the turns of a completion


class RewardConfig(Section):
    """One reward: a function from completions to numbers, see docs/rewards.md. An entry is named on the command line
    by its name or its number, from 0: `rewards.answer.deadline=2`."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$", max_length=64)]
    """Name of the reward in logs, metrics and reports: letters, digits, `_` and `-`. Each reward has its own."""

    use: str
    """What computes it: format, syntax, length, overlong, repetition, exact_match, regex, json_schema, math,
    code_tests, model or environment; or your own function, as `module:function` or `path.py:function`. It gets
    `completions` and the columns of their rows by name, and returns a number for each completion, or None where nothing
    is known."""

    path: UserPath | None = None
    """model: the reward model, as the folder or the name of a run of task mode reward_model, or as the folder of any
    model for sequence classification with one label, or of an adapter for it."""

    options: dict[str, Any] = Field(default_factory=dict)
    """What else the function is given, by name: `{pattern: "yes|no"}`."""

    weight: float = 1.0
    """What its value is multiplied by in the sum that a model learns from. 0 means that it is measured only."""

    judges: Literal["content", "form"] | None = None
    """content: only a right answer gets its full value. form: any answer of the right shape does. `reward-check` and
    the share of answers that pass go by it. None takes a function of yours to judge the content; what shipped rewards
    judge is known."""

    deadline: PositiveFloat = 10.0
    """Seconds that it may take: a shipped reward for each completion, a function of yours for each batch. Then nothing
    is known of these completions: they count as None, never as 0."""


class SandboxConfig(Section):
    """The boxes in which the programs of a model run (reward code_tests), see docs/sandbox.md."""

    executor: Literal["auto", "bwrap", "landlock", "none"] = "auto"
    """What boxes are made of. auto takes bwrap (bubblewrap), or landlock, whichever first passes its self-test here,
    and refuses to start where neither does. none isolates nothing: programs that a model wrote can do whatever you can
    do, and results say so."""

    timeout: PositiveFloat = 5.0
    """Seconds that a program may take for all its tests."""

    test_timeout: PositiveFloat = 4.0
    """Seconds that it may take for one test."""

    memory: str | Positive = "512MiB"
    """Memory of one process of a program: 512MiB, 1GiB or a number of bytes. numpy needs 1GiB."""

    packages: list[str] = Field(default_factory=list)
    """Packages that programs may import besides Python's own, as `import` names them: [numpy, sympy]. The box shows
    their folders and no others."""


LEAST_MEMORY = 64 << 20  # bytes that the interpreter itself needs, with room for a small program


def broken_reward_rules(cfg: RunConfig) -> Iterator[Problem]:
    """Yield limits of the sandbox that contradict each other, and deadlines that the sandbox cannot keep."""
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
        path = f"rewards.{number}.path"
        if reward.use == MODEL and reward.path is None:
            what, fix = "the reward model needs a model to ask", f"write {path}: RUN, a run of task_mode reward_model"
            yield Problem((path, f"rewards.{number}.use"), what, fix=fix)
        if reward.use == MODEL and cfg.task.turns == 2:
            what = f"task_mode {cfg.task_mode} counts right answers, and a model's score has no value for right"
            yield Problem(
                (f"rewards.{number}.use", "task_mode"), what, fix="use a reward of 0 to 1, or task_mode: grpo"
            )
        if reward.use == ENVIRONMENT and not (cfg.task.learns_from_rewards and cfg.grpo.environment):
            what = "nothing gives the reward environment: there is no grpo.environment"
            fix = "name one in task_mode grpo, or use another reward"
            yield Problem((f"rewards.{number}.use", "grpo.environment"), what, fix=fix)
        if reward.use != MODEL and reward.path is not None:
            what = f"{reward.path} is given, but {reward.use} asks no model"
            yield Problem((path, f"rewards.{number}.use"), what, fix=f"write use: {MODEL}, or remove path")
        if reward.use == CODE_TESTS and reward.deadline < box.timeout:
            what = f"ends before a program has had its {box.timeout:g} s: an endless loop would never count as 0"
            keys = (f"rewards.{number}.deadline", "sandbox.timeout")
            yield Problem(keys, what, fix="raise it above sandbox.timeout, or lower sandbox.timeout")


def idle_reward_keys(cfg: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Yield the keys of the sandbox, with the reason, where no programs run."""
    if not any(reward.use == CODE_TESTS for reward in cfg.rewards):
        for name in type(cfg.sandbox).model_fields:
            yield f"sandbox.{name}", f"sandbox.{name}", f"no reward uses {CODE_TESTS}"
