"""What an interrupted ingestion has done, in a hidden folder beside OUT: the next same command goes on from there.

Every stage's result has a name made of all it depends on, so that nothing old is ever taken for new.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sftplay.atomic import locked, read_object
from sftplay.errors import ConfigError

ERRORS = "errors.txt"
"""In the folder: what libraries print, and the tracebacks of children that died."""


class Work:
    """The folder, and the names in it."""

    def __init__(self, out: Path) -> None:
        self.folder = out.with_name(f".{out.name}.ingest")

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Hold the folder for this process alone.

        Raises:
            ConfigError: another process makes the same OUT, or nothing can be written there.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot be written: {error.strerror}", where=str(self.folder.parent)) from error
        try:
            with locked(self.folder / "lock", waits=False):
                yield
        except BlockingIOError:
            fix = "wait for it, or choose another OUT"
            raise ConfigError("another process makes this file now", where=str(self.folder), fix=fix) from None

    def stem(self, parts: dict[str, Any]) -> str:
        """Where a stage puts its result, whose content depends on these parts."""
        return str(self.folder / hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32])

    def remove(self) -> None:
        """Nothing is left to go on from: OUT is there."""
        shutil.rmtree(self.folder, ignore_errors=True)


def answer_path(stem: str) -> str:
    """The file that says what a stage has found. It is written when all else of the stage is."""
    return f"{stem}.json"


def read_answer(stem: str) -> dict[str, Any] | None:
    """What a stage has found; None where it has not ended."""
    return read_object(Path(answer_path(stem))) or None


def forget(stem: str) -> None:
    """Remove what a stage has left."""
    for path in Path(stem).parent.glob(f"{Path(stem).name}.*"):
        path.unlink(missing_ok=True)
