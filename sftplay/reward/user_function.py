"""A reward function of the user's, named as `module:function` or `path.py:function`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sftplay.errors import ConfigError

RewardFunction = Callable[..., list[float | None]]


def is_user_function(name: str) -> bool:
    """Say whether a name has the form of a user's function."""
    return ":" in name


def load_function(name: str, *, where: str = "rewards") -> RewardFunction:
    """Import the function behind `module:function` or `path.py:function`, and with it the user's module.

    Raises:
        ConfigError: there is no such file, module or function, or importing it fails.
    """
    place, _, function_name = name.rpartition(":")
    try:
        module = _import_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:
        what = f"{place!r} cannot be imported: {type(error).__name__}: {error}"
        fix = "name a Python file (path.py:function) or an installed module"
        raise ConfigError(what, where=where, fix=fix) from error
    found = getattr(module, function_name, None)
    if not callable(found):
        known = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        fix = f"it has {', '.join(known) or 'no function at all'}"
        raise ConfigError(f"{place!r} has no function {function_name!r}", where=where, fix=fix)
    return found


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"no file {str(path)!r}")
    name = f"sftplay_user_reward_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look modules up there
    spec.loader.exec_module(module)
    return module
