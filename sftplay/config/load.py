"""YAML files and overrides to a checked `RunConfig` that remembers where each value was written.

Precedence: command line > file > include > default. All problems are reported at once, in the order of the files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_origin

from pydantic import ValidationError

from sftplay.config.data import needs_train_path
from sftplay.config.keys import (
    all_keys,
    all_sections,
    find_entry_section,
    find_section,
    general_key,
    list_keys,
    required_below,
)
from sftplay.config.layers import (
    Layer,
    LocatedProblem,
    SourceLocation,
    is_written_by_kit,
    merge,
    nested,
    read_layers,
    read_overrides,
    resolve_precision,
    resolve_task_mode,
    walk,
)
from sftplay.config.rules import broken_rules
from sftplay.config.run import RunConfig
from sftplay.config.section import Section
from sftplay.errors import ConfigError, ConfigErrors

TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{30,}")


def load_config(path: str | Path, overrides: Sequence[str] = (), *, above: Sequence[Layer] = ()) -> RunConfig:
    """Load the config in a YAML file, laid over what it includes, with `a.b=c` texts laid over both, and the layers
    `above` over all.

    Of two overrides of one key the later one counts. Paths in messages and origins are as the user typed them, those of
    includes relative to the current folder. In a run's folder renamed keys are read by their new names.

    Raises:
        ConfigError: a file that cannot be read or is not YAML.
        ConfigErrors: everything else that is wrong with it, all at once.
    """
    cfg, problems = examine_config(path, overrides, above=above)
    if problems:
        raise ConfigErrors(problems)
    assert cfg is not None
    return cfg


def examine_config(
    path: str | Path, overrides: Sequence[str] = (), *, above: Sequence[Layer] = ()
) -> tuple[RunConfig | None, list[ConfigError]]:
    """Return everything that is wrong with a config, and the config with defaults instead of what was refused; None
    where nothing sensible is left. `origins` names only what was accepted.

    Raises:
        ConfigError: a file that cannot be read or is not YAML.
    """
    override_layer, problems = read_overrides(overrides)
    *included, written = read_layers(path)
    if is_written_by_kit(Path(path)):
        from sftplay.config.resolved import with_new_names

        written = with_new_names(written)
    layers, contradictions = resolve_precision([*included, written, override_layer, *above])
    problems += contradictions
    merged = merge(resolve_task_mode(layers))
    merged = Layer(_with_empty_sections(merged.values, RunConfig), merged.locations)
    for at, value in walk(merged.values):
        if isinstance(value, str) and TOKEN.search(value):  # run folder, report and export would repeat it
            location = merged.find_location(at) or SourceLocation(0, 0, "")
            what, fix = "holds a token of the Hugging Face hub", "remove it, and set HF_TOKEN in the environment"
            where = f"{location} {'.'.join(map(str, at))}"
            problems.append(LocatedProblem(location, ConfigError(what, where=where, fix=fix)))
    cfg: RunConfig | None
    try:
        cfg = RunConfig.model_validate(merged.values)
    except ValidationError as error:
        from sftplay.config.problems import translated

        problems += translated(error, merged, file=os.fspath(path))
        cfg = _without_refused(merged.values, error)
    if cfg is not None:
        cfg = cfg.with_origins(_origins(merged))
        if needs_train_path(cfg) and "data.train_path" not in offending_keys(problems):
            from sftplay.config.problems import missing_key

            problems.append(missing_key("data.train_path", merged, file=os.fspath(path)))
        # Rules look only at values which are right in themselves.
        offending = offending_keys(problems)
        for broken in (problem for problem in broken_rules(cfg) if offending.isdisjoint(problem.keys)):
            location = merged.find_location(tuple(broken.key_in(cfg).split("."))) or SourceLocation(0, 0, "")
            problems.append(LocatedProblem(location, broken.as_error(cfg)))
        offending = offending_keys(problems)
        cfg = cfg.with_origins({key: location for key, location in cfg.origins.items() if key not in offending})
    return cfg, [problem.error for problem in sorted(problems, key=lambda problem: problem.location)]


def load_resolved(path: Path) -> RunConfig:
    """Load the config in a file that `dump_resolved` wrote, with the origins that its comments name; raises as
    `load_config`."""
    from sftplay.config.resolved import read_origins

    cfg = load_config(path)
    return cfg.with_origins(read_origins(cfg, path.read_text(encoding="utf-8")))


def offending_keys(problems: Iterable[LocatedProblem]) -> set[str]:
    """Return the dotted keys that problems are about, and those that an unknown name may have meant."""
    found: set[str] = set()
    for _, error in problems:
        key = error.where.rpartition(" ")[2]
        found |= {key, *error.nearest, *(outer for outer in list_keys() if key.startswith(f"{outer}."))}
    return found


def _with_empty_sections(values: dict[str, Any], section: type[Section]) -> dict[str, Any]:
    """A section whose keys are all commented out (`train:`) is an empty section, not null."""
    filled = dict(values)
    for key, value in values.items():
        field = section.model_fields.get(key)
        inner = find_section(field) if field else None
        if inner and isinstance(value, dict):
            filled[key] = _with_empty_sections(value, inner)
        elif value is None and field and (inner or get_origin(field.annotation) is dict):
            filled[key] = {}
        elif value is None and field and find_entry_section(field):
            filled[key] = []
    return filled


def _without_refused(values: dict[str, Any], error: ValidationError) -> RunConfig | None:
    """The config without the refused values, so that the rules between the others are checked in the same go."""
    tree = dict(values)
    for refused in error.errors():
        # Inside a list or one form of a union, the whole value of the key is dropped.
        branch = tree
        for part in refused["loc"]:
            inner = branch.get(str(part))
            if not isinstance(inner, dict) or part == refused["loc"][-1]:
                branch.pop(str(part), None)
                break
            branch[str(part)] = branch = dict(inner)
    stand_ins = [Layer(nested(key, "unknown")) for key in required_below("")]
    try:
        return RunConfig.model_validate(merge([*stand_ins, Layer(tree)]).values)
    except ValidationError:
        return None


def _origins(merged: Layer) -> dict[str, str]:
    """Dotted key -> place, of every key that holds a value, of a list's entries too, and of every key below `extra`."""
    origins = {}
    for path, location in merged.locations.items():
        key = ".".join(map(str, path))
        holds_value = key not in all_sections() or key in list_keys()
        is_key = all(isinstance(part, str) for part in path) or general_key(key) in all_keys()
        if holds_value and is_key and isinstance(path[-1], str):
            origins[key] = str(location)
    return origins
