"""Two accepted spellings: `train.bf16` and `train.fp16` for `train.precision`.

What they stand for:

- `true` is that precision; both true are refused.
- both `false` are fp32.
- one `false` alone names nothing, it only rules a precision out. It is accepted where the precision is decided
  elsewhere and is another one, and refused where it is the one ruled out or left to auto.
- a file (or the command line) that gives `precision` as well must agree with what they stand for.
- a higher layer replaces what lower ones decided, exactly as `precision` itself would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sftplay.config.read.layers import Layer, Place, Problem
from sftplay.errors import ConfigError

SPELLINGS = ("bf16", "fp16")
PRECISION = ("train", "precision")


@dataclass(frozen=True)
class _Reading:
    """What the switches of one layer stand for: a decision, or a precision that is ruled out."""

    decided: str | None
    ruled_out: str | None
    place: Place
    name: str


def resolve_precision(layers: Sequence[Layer]) -> tuple[list[Layer], list[Problem]]:
    """The layers with both spellings replaced by `train.precision`, and the contradictions found, lowest first."""
    settled, problems = [], []
    decided: Any = None
    pending: Problem | None = None
    for layer in layers:
        found, reading = _read(layer)
        problems += found
        layer = _without_spellings(layer)
        given = layer.values["train"].get("precision") if isinstance(layer.values.get("train"), dict) else None
        if reading and reading.decided and given is None:
            layer = _with_precision(layer, reading.decided, reading.place)
            given = reading.decided
        elif reading and given is not None and _contradicts(reading, given):
            problems.append(_contradiction(reading, given))
        if given is not None:
            decided, pending = given, None
        if reading and reading.ruled_out and decided in (None, "auto", reading.ruled_out):
            pending = _undecided(reading) if given is None else pending
        settled.append(layer)
    return settled, [*problems, *([pending] if pending else [])]


def _read(layer: Layer) -> tuple[list[Problem], _Reading | None]:
    train = layer.values.get("train")
    switches = {name: train[name] for name in SPELLINGS if name in train} if isinstance(train, dict) else {}
    problems = [_no_switch(layer, name, value) for name, value in switches.items() if not isinstance(value, bool)]
    if problems or not switches:
        return problems, None
    chosen = [name for name, on in switches.items() if on]
    place, name = min((layer.places[("train", name)], name) for name in chosen or switches)
    if len(chosen) == 2:
        fix = "keep one of them, or write train.precision: bf16"
        return [Problem(place, ConfigError("both are true", where=f"{place} train.bf16, train.fp16", fix=fix))], None
    if chosen or len(switches) == 2:
        return [], _Reading(chosen[0] if chosen else "fp32", None, place, name)
    return [], _Reading(None, name, place, name)


def _contradicts(reading: _Reading, given: Any) -> bool:
    return given != reading.decided if reading.decided else given in ("auto", reading.ruled_out)


def _contradiction(reading: _Reading, given: Any) -> Problem:
    said = reading.decided or f"not {reading.ruled_out}"
    what = f"says {said}, but train.precision says {given}"
    fix = "keep train.precision alone"
    return Problem(reading.place, ConfigError(what, where=f"{reading.place} train.{reading.name}", fix=fix))


def _undecided(reading: _Reading) -> Problem:
    name = reading.ruled_out
    what = "false says what not to use, and nothing says what to use"
    fix = f"write train.precision: fp32 or {'fp16' if name == 'bf16' else 'bf16'}"
    return Problem(reading.place, ConfigError(what, where=f"{reading.place} train.{name}", fix=fix))


def _no_switch(layer: Layer, name: str, value: Any) -> Problem:
    place = layer.places[("train", name)]
    fix = "write train.precision: auto" if value == "auto" else "write true or false, or use train.precision"
    what = f"{value!r} is not true or false"
    return Problem(place, ConfigError(what, where=f"{place} train.{name}", fix=fix))


def _without_spellings(layer: Layer) -> Layer:
    train = layer.values.get("train")
    if not isinstance(train, dict) or not any(name in train for name in SPELLINGS):
        return layer
    kept = {key: value for key, value in train.items() if key not in SPELLINGS}
    dropped = {("train", name) for name in SPELLINGS}
    places = {path: place for path, place in layer.places.items() if path[:2] not in dropped}
    return Layer({**layer.values, "train": kept}, places)


def _with_precision(layer: Layer, precision: str, place: Place) -> Layer:
    train = {**layer.values["train"], "precision": precision}
    return Layer({**layer.values, "train": train}, {**layer.places, PRECISION: place})
