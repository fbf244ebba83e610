"""From files and the command line to one tree of values, each remembering where it was written.

Files, their includes and the overrides are layers; a higher one wins. Nothing here knows which keys exist.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from sftplay.config.read import yaml12
from sftplay.config.read.yaml12 import KeyPath
from sftplay.errors import ConfigError

COMMAND_LINE = "command line"
_LAST = 1_000_000  # rank of the first override, behind any number of files


class Place(NamedTuple):
    """Where a value was written; places sort as a reader meets them: the file, its includes, the command line."""

    rank: int
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.name}:{self.line}" if self.line else self.name


class Problem(NamedTuple):
    """A config problem and the place it is listed at."""

    place: Place
    error: ConfigError


@dataclass
class Layer:
    """A tree of values and the place of every key in it."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[KeyPath, Place] = field(default_factory=dict)

    def place_of(self, path: KeyPath) -> Place | None:
        """The place of a key, else of the nearest section around it that was written down."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.places:
                return self.places[path[:length]]
        return None


def read_layers(path: str | Path) -> list[Layer]:
    """The layers of a file: what it includes, lowest first, and then the file itself.

    Raises:
        ConfigError: a file that cannot be read, an include that is no path, or that leads back to itself.
    """
    layers: list[Layer] = []
    _read_into(layers, Path(path), os.fspath(path), [])
    ranks = {id(layer): rank for rank, layer in enumerate(reversed(layers))}
    for layer in layers:
        layer.places = {key: place._replace(rank=ranks[id(layer)]) for key, place in layer.places.items()}
    return layers


def read_overrides(overrides: Sequence[str]) -> tuple[Layer, list[Problem]]:
    """The layer of `a.b=value` texts, a later one over an earlier, and a problem for each that cannot be read.

    A value that starts with a bracket, a brace or a quote is read as YAML; any other is one plain word, kept as it
    stands but for the numbers, booleans and null of YAML 1.2. So `model.name=a: b` and `run_name=#1` are texts.
    """
    merged, problems = Layer(), []
    for order, text in enumerate(overrides):
        place = Place(_LAST + order, 0, COMMAND_LINE)
        try:
            merged = merged_over(merged, _override(text, place))
        except ConfigError as error:
            problems.append(Problem(place, error))
    return merged, problems


def merge(layers: Sequence[Layer]) -> Layer:
    """All layers in one, sections merged key by key, every other value replaced by the highest layer that has it."""
    merged = Layer()
    for layer in layers:
        merged = merged_over(merged, layer)
    return merged


def merged_over(below: Layer, above: Layer) -> Layer:
    """`above` laid over `below`; neither is changed."""
    places = dict(below.places)
    values = _laid(below.values, above.values, (), places)
    return Layer(values, {**places, **above.places})


def nested(dotted: str, value: Any) -> dict[str, Any]:
    """The tree in which only that key is set."""
    for part in reversed(dotted.split(".")):
        value = {part: value}
    return dict(value)


def _laid(below: dict[str, Any], above: dict[str, Any], path: KeyPath, places: dict[KeyPath, Place]) -> dict[str, Any]:
    values = dict(below)
    for key, value in above.items():
        inner, old = (*path, key), below.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            values[key] = _laid(old, value, inner, places)
        elif isinstance(old, dict) and value is None:
            continue  # a section whose keys are all commented out says nothing
        else:
            values[key] = value
            for known in [known for known in places if known[: len(inner)] == inner]:
                del places[known]
    return values


def _read_into(layers: list[Layer], path: Path, name: str, open_files: list[Path]) -> None:
    document = yaml12.read(path, name)
    places = {key: Place(0, line, name) for key, line in document.lines.items()}
    values = dict(document.values)
    opened = [*open_files, path.resolve()]
    for order, included in enumerate(_include_list(values, name, places)):
        place = places.get(("include", order), places.get(("include",)))
        inner = path.parent / included
        _check_include(inner, included, opened, f"{place} include")
        _read_into(layers, inner, _shown(inner), opened)
    values.pop("include", None)
    layers.append(Layer(values, {key: place for key, place in places.items() if key[0] != "include"}))


def _include_list(values: dict[str, Any], name: str, places: dict[KeyPath, Place]) -> list[str]:
    included = values.get("include", [])
    listed = [included] if isinstance(included, str) else included
    if included is None or not isinstance(listed, list) or not all(isinstance(one, str) and one for one in listed):
        where = f"{places[('include',)]} include"
        shown = "null" if included is None else repr(included)
        raise ConfigError(f"{shown} is no path and no list of paths", where=where, fix="name a YAML file")
    return listed


def _check_include(inner: Path, included: str, opened: list[Path], where: str) -> None:
    if inner.resolve() in opened:
        chain = " -> ".join(_shown(path) for path in [*opened, inner.resolve()])
        raise ConfigError(f"leads back to itself: {chain}", where=where, fix="remove one of these includes")
    if inner.exists():
        return
    what = f"no such file: {_shown(inner)}"
    if Path(included).exists():
        beside = os.path.relpath(included, opened[-1].parent)
        raise ConfigError(what, where=where, fix=f"paths start at the including file: write include: {beside}")
    raise ConfigError(what, where=where, fix="correct the path; it starts at the folder of the including file")


def _shown(path: Path) -> str:
    """The path as messages print it: relative to the current folder where it lies below it."""
    tidy = Path(os.path.normpath(path))
    try:
        return str(tidy.relative_to(Path.cwd())) if tidy.is_absolute() else str(tidy)
    except ValueError:
        return str(tidy)


def _override(text: str, place: Place) -> Layer:
    key, sign, value = text.removeprefix("--").partition("=")
    key = key.strip()
    if not sign or not all(key.split(".")):
        what = f"{text!r} is not of the form key=value"
        raise ConfigError(what, where=COMMAND_LINE, fix="write it like train.max_steps=100, without spaces around =")
    if key == "include":
        raise ConfigError("include works in a file only", where=COMMAND_LINE, fix="put it into the YAML file")
    path = tuple(key.split("."))
    parsed = _parsed(value.strip(), key)
    return Layer(nested(key, parsed), {path: place, **{(*path, *inner): place for inner in _paths_in(parsed)}})


def _parsed(value: str, key: str) -> Any:
    if not value.startswith(("[", "{", '"', "'")):
        return yaml12.scalar(value)
    try:
        return yaml12.parse(value, COMMAND_LINE).values
    except ConfigError as error:
        what = f"the value {value!r} is {error.what}"
        raise ConfigError(what, where=f"{COMMAND_LINE} {key}", fix="check its quotes and brackets") from None


def _paths_in(value: Any) -> list[KeyPath]:
    if isinstance(value, dict):
        inner = list(value.items())
    elif isinstance(value, list):
        inner = list(enumerate(value))
    else:
        return []
    return [path for key, below in inner for path in [(key,), *((key, *rest) for rest in _paths_in(below))]]
