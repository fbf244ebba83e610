"""Other spellings of values: of precisions, of task modes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sftplay.config.read.layers import Layer, LocatedProblem, SourceLocation, nested
from sftplay.errors import ConfigError

SPELLINGS = ("bf16", "fp16")


@dataclass(frozen=True)
class _Switches:
    """What the switches of one layer allow, and the switch that problems are reported at."""

    allowed: tuple[str, ...]
    location: SourceLocation
    name: str

    def problem(self, what: str, fix: str) -> LocatedProblem:
        return _problem(self.location, f"train.{self.name}", what=what, fix=fix)


def resolve_precision(layers: Sequence[Layer]) -> tuple[list[Layer], list[LocatedProblem]]:
    """The layers with the switches replaced by `train.precision`, and the contradictions found, lowest first."""
    resolved, problems = [], []
    decided: Any = None
    undecided: list[LocatedProblem] = []
    for layer in layers:
        switches, found = _switches_of(layer)
        problems += found
        given = layer.values["train"].get("precision") if isinstance(layer.values.get("train"), dict) else None
        if switches and given is None and len(switches.allowed) == 1:
            given = switches.allowed[0]
        elif switches and given is not None and given not in switches.allowed:
            said = switches.allowed[0] if len(switches.allowed) == 1 else f"not {switches.name}"
            what = f"says {said}, but train.precision says {given}"
            problems.append(switches.problem(what, "keep train.precision alone"))
        if given is not None:
            decided, undecided = given, []
        elif switches and decided not in switches.allowed:
            what = "false says what not to use, and nothing says what to use"
            undecided = [switches.problem(what, f"write train.precision: {' or '.join(switches.allowed)}")]
        resolved.append(_with_precision(layer, given, switches=switches))
    return resolved, problems + undecided


def _switches_of(layer: Layer) -> tuple[_Switches | None, list[LocatedProblem]]:
    train = layer.values.get("train")
    values = {name: train[name] for name in SPELLINGS if name in train} if isinstance(train, dict) else {}
    problems = [_no_boolean(layer, name, value=value) for name, value in values.items() if not isinstance(value, bool)]
    if problems or not values:
        return None, problems
    chosen = [name for name, on in values.items() if on]
    location, name = min((layer.locations["train", name], name) for name in chosen or values)
    if len(chosen) == 2:
        fix = "keep one of them, or write train.precision: bf16"
        return None, [_problem(location, "train.bf16, train.fp16", what="both are true", fix=fix)]
    allowed = chosen or [word for word in ("fp32", *SPELLINGS) if word not in values]
    return _Switches(tuple(allowed), location, name), []


def _no_boolean(layer: Layer, name: str, *, value: Any) -> LocatedProblem:
    fix = "write train.precision: auto" if value == "auto" else "write true or false, or use train.precision"
    return _problem(layer.locations["train", name], f"train.{name}", what=f"{value!r} is not true or false", fix=fix)


def _problem(location: SourceLocation, keys: str, *, what: str, fix: str) -> LocatedProblem:
    return LocatedProblem(location, ConfigError(what, where=f"{location} {keys}", fix=fix))


def _with_precision(layer: Layer, precision: Any, *, switches: _Switches | None) -> Layer:
    """The layer without its switches, and with the precision that they decide."""
    train = layer.values.get("train")
    if not isinstance(train, dict):
        return layer
    train = {key: value for key, value in train.items() if key not in SPELLINGS}
    locations = {
        path: location
        for path, location in layer.locations.items()
        if path[:2] not in [("train", n) for n in SPELLINGS]
    }
    if switches and precision is not None and train.get("precision") is None:
        train["precision"], locations["train", "precision"] = precision, switches.location
    return Layer({**layer.values, "train": train}, locations)


TASK_SPELLINGS = {"dapt": "cpt"}
"""Accepted word -> the task that it stands for."""

NO_PRETRAINED = "builtin:hrm"
"""model.name in task mode hrm: the model is made of the section hrm, from nothing."""


def resolve_task_mode(layers: Sequence[Layer]) -> list[Layer]:
    """The layers with the accepted words replaced by the task's own name."""
    return [
        Layer({**layer.values, "task_mode": TASK_SPELLINGS[word]}, layer.locations)
        if isinstance(word := layer.values.get("task_mode"), str) and word in TASK_SPELLINGS
        else layer
        for layer in layers
    ]


def with_own_model(layers: Sequence[Layer]) -> list[Layer]:
    """The layers, above one that says what task mode hrm has in place of a pretrained model."""
    words = [layer.values["task_mode"] for layer in layers if "task_mode" in layer.values]
    if words[-1:] != ["hrm"]:
        return list(layers)
    return [Layer(nested("model.name", NO_PRETRAINED) | nested("tuning.mode", "full")), *layers]
