"""What a process of the kit does about the libraries it is about to import. Where it is not called, nothing changes."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable

RARELY = (100_000, 50, 100)
"""Thresholds of the search for circles of objects during imports. They make a million objects that all stay; with
Python's own thresholds the search through them takes a third of the time."""

_usual: tuple[int, int, int] | None = None


def begin_imports() -> None:
    """Search for circles of objects rarely from now on; for the entry point of a process."""
    global _usual
    _usual = _usual or gc.get_threshold()
    gc.set_threshold(*RARELY)


def leave_out(libraries: Iterable[str]) -> None:
    """Let others find these libraries nowhere in this process: None in sys.modules is Python's way to say so.

    Only where `begin_imports` was called, and where neither the library nor PEFT, which asks for it, is in memory.
    """
    if _usual is not None and "peft" not in sys.modules:
        for name in libraries:
            sys.modules.setdefault(name, None)  # type: ignore[arg-type]


def end_imports() -> None:
    """Search as usual again, without what is there now. From here on circles may hold tensors, so memory counts."""
    global _usual
    if _usual is not None:
        gc.freeze()
        gc.set_threshold(*_usual)
        _usual = None
