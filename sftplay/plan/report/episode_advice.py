"""What to change when two-turn episodes do not fit: the cheapest first, each change sized as the run itself would be.

So the layout is chosen anew behind each change. Nothing is ever changed by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sftplay.config.rules.score import broken_score_rules
from sftplay.config.schema.run import RunConfig
from sftplay.errors import ConfigError
from sftplay.plan.devices.layout import PLACEMENT
from sftplay.plan.memory.forecast import Place, forecast_one_row
from sftplay.plan.report.advice import Step, Suggestion, added_up, first_that_fit, step_to, steps_of
from sftplay.plan.shape.model_shape import ModelShape
from sftplay.plan.sizing.placement import can_split
from sftplay.plan.sizing.size_run import SizedRun
from sftplay.plan.sizing.strategy import STRATEGY

EXACT = ("train.gradient_checkpointing", "train.optim=adamw_torch_fused")
"""Changes that cost time or nothing, and that go with models in shards."""

Sizing = Callable[..., SizedRun]
"""Sizes a config for the machine in question; `shape` is that of its model."""


def suggest_for_episodes(cfg: RunConfig, shape: ModelShape, *, sizing: Sizing) -> list[Suggestion]:
    """Changes with which one row a micro-batch fits; where no single one does, all of them added up in order.

    `cfg` is as the user wrote it, with its `auto`.
    """
    sized = sizing(cfg, shape=shape)
    assert sized.forecast is not None
    place = Place(sized.forecast.setting.device, sized.world_size)
    steps = [_released(step, cfg) for step in steps_of(sized.cfg, place)]
    exact = [step for step in steps if step.change.startswith(EXACT)]
    others = [step for step in steps if step not in exact]
    split = list(_split(cfg, sized))
    return first_that_fit(
        [*exact, *split, *others],
        lambda tried: _attempt(cfg, shape, steps=tried, sizing=sizing),
        together=[*added_up([*exact, *split]), *added_up(steps)],
    )


def _attempt(cfg: RunConfig, shape: ModelShape, *, steps: list[Step], sizing: Sizing) -> Suggestion | None:
    changed = cfg.with_values({key: value for step in steps for key, value in step.values.items()}, "suggestion")
    if any(broken_score_rules(changed)):
        return None
    try:
        sized = sizing(changed, shape=shape)
    except ConfigError:  # the change contradicts the number of processes
        return None
    assert sized.forecast is not None
    setting = sized.forecast.setting
    place = Place(setting.device, setting.world_size)
    seen = forecast_one_row(sized.cfg, shape, place=place, strategy=setting.strategy)
    return Suggestion(", ".join(step.change for step in steps), seen.peak_bytes, seen.verdict == "fits")


def _split(cfg: RunConfig, sized: SizedRun) -> Iterator[Step]:
    """Models in shards, where the config as it is written leaves them out."""
    is_open = cfg.score.placement == "auto" and cfg.cluster.strategy == "auto"
    if is_open or sized.cfg.score.placement == "sharded":
        return
    if can_split(cfg.with_values({STRATEGY: "auto", "train.precision": sized.cfg.train.precision}, "suggestion")):
        yield step_to({PLACEMENT: "sharded", **({STRATEGY: "fsdp"} if cfg.cluster.strategy == "ddp" else {})})


def _released(step: Step, cfg: RunConfig) -> Step:
    """The step with the layout left to the kit, where what is written for it forbids the step."""
    if not any(broken_score_rules(cfg.with_values(step.values, "suggestion"))):
        return step
    keys = (PLACEMENT, STRATEGY)
    free = {key: "auto" for key in keys if cfg.value_of(key) in ("sharded", "fsdp")}
    return Step(", ".join([step.change, *(f"{key}=auto" for key in free)]), {**step.values, **free})
