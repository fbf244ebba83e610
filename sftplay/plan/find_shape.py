"""Finds a model's shape by name: in a folder, in the hub's cache on this machine, or in the shipped table.

It never asks the hub and loads no weights; `from_config` reads a config.json."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sftplay.errors import ConfigError
from sftplay.places import find_hub_cache

if TYPE_CHECKING:
    from sftplay.config.run import ModelConfig
    from sftplay.plan.shape import ModelShape


TABLE = Path(__file__).with_name("shapes.json")


def find_shape(
    name: str, revision: str | None = None, *, builtin: Mapping[str, Mapping[str, Any]] | None = None
) -> ModelShape | None:
    """Find the shape of the model `name`, or None when only the hub could tell.

    Looked for in a folder `name`; in `builtin`, a mapping of names to what their config.json holds; in the hub's cache
    on this machine; in the shipped table, by the hub's name or by its last part where all of that name are alike.

    Raises:
        ConfigError: a config.json that was found cannot be read or used.
    """
    from sftplay.plan.shape_from_config import known_or_built

    if builtin and name in builtin and not os.path.isdir(name):  # noqa: PTH112
        return known_or_built(builtin[name], name=name)
    if here := find_config(name, revision):
        return _read(here, name)
    table = read_table()
    same = [table[name]] if name in table else [table[known] for known in table if known.rpartition("/")[2] == name]
    return known_or_built(same[0], name=name) if same and all(entry == same[0] for entry in same) else None


def advise_length(model: ModelConfig, tokens: int) -> str:
    """Return what to do about rows that are cut, where 99 % of them would fit into `tokens`: write that, or as many as
    the model has positions, where these are known here."""
    try:
        shape = find_shape(model.name, model.revision)
    except ConfigError:
        shape = None
    most = (shape.max_positions if shape else None) or tokens
    if tokens <= most:
        return f"write model.max_seq_len: {tokens}, which keeps 99 % of the rows whole"
    need = f"99 % of the rows need {tokens}"
    if model.max_seq_len < most:
        return f"write model.max_seq_len: {most}, all the positions that {model.name} has ({need})"
    return f"shorten or split the rows: {model.name} has {most} positions, and {need}"


def find_config(name: str, revision: str | None = None) -> Path | None:
    """Find the config.json of the model `name` in a folder, where it may be missing, or in the hub's cache."""
    if os.path.isdir(name):  # noqa: PTH112 - false for what is longer than a path
        return Path(name) / "config.json"
    return _find_cached(name, revision)


def _read(path: Path, name: str) -> ModelShape:
    from sftplay.plan.shape_from_config import known_or_built

    where = str(path)
    try:
        config = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        fix = "name a folder with a model, or the model's name on the hub"
        raise ConfigError("the folder holds no config.json", where=str(path.parent), fix=fix) from None
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=where, fix="make it a readable file") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"is not JSON: {error}", where=where, fix="copy the model's own config.json again") from None
    return replace(known_or_built(config, name=where), name=name)


def _find_cached(name: str, revision: str | None) -> Path | None:
    """The config.json of a model in the hub's cache, by huggingface_hub's guide on the cache's layout."""
    repository = find_hub_cache() / f"models--{name.replace('/', '--')}"
    if not os.path.isdir(repository):  # noqa: PTH112
        return None
    wanted = revision or "main"
    try:
        commit = (repository / "refs" / wanted).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        commit = wanted
    path = repository / "snapshots" / commit / "config.json"
    return path if path.is_file() else None


def read_table() -> dict[str, dict[str, Any]]:
    """Read the shipped table: hub name -> the keys of its config.json that a shape needs.

    The file holds groups of models: keys all share, columns, and a row of values for each model with the keys that
    differ (`but`) and the names that have the same shape (`also`).
    """
    entries: dict[str, dict[str, Any]] = {}
    for group in json.loads(TABLE.read_text(encoding="utf-8"))["groups"]:
        for model in group["models"]:
            row = dict(zip(group["columns"], model["values"], strict=True))
            config = {**group["shared"], **row, **model.get("but", {})}
            entries |= dict.fromkeys([model["name"], *model.get("also", [])], config)
    return entries
