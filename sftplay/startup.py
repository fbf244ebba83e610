"""What a process of the kit does about the libraries it is about to import. Where it is not called, nothing changes."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

RARELY = (100_000, 50, 100)
"""Thresholds of the search for circles of objects during imports. They make a million objects that all stay; with
Python's own thresholds the search through them takes a third of the time."""

_usual: tuple[int, int, int] | None = None
_left_out: set[str] = set()


def begin_imports() -> None:
    """Search for circles of objects rarely from now on; for the entry point of a process."""
    global _usual
    _usual = _usual or gc.get_threshold()
    gc.set_threshold(*RARELY)


class _PartialFinder(PathFinder):
    """Python's own finder without what is left out. None in sys.modules would be a trace, at which datasets fails."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None if name in _left_out else super().find_spec(name, path, target)


def leave_out(libraries: Iterable[str]) -> None:
    """Let nobody find these libraries in this process: others import them wherever they are installed.

    Only where `begin_imports` was called, and where neither the library nor PEFT, which asks for it, is in memory.
    """
    if _usual is not None and "peft" not in sys.modules:
        _left_out.update(name for name in libraries if name not in sys.modules)
        if PathFinder in sys.meta_path:
            sys.meta_path[sys.meta_path.index(PathFinder)] = _PartialFinder


def end_imports() -> None:
    """Search as usual again, without what is there now. From here on circles may hold tensors, so memory counts."""
    global _usual
    if _usual is not None:
        gc.freeze()
        gc.set_threshold(*_usual)
        _usual = None
