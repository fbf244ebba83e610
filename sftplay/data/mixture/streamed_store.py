"""Read a store while another process writes it. A reader waits for what it needs, or gets the writer's error."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from sftplay.atomic import examine_object, is_locked, unfinished_folder
from sftplay.data.cache import SEAL, get_lock_path
from sftplay.data.mixture.store import Index, Store
from sftplay.data.tokenize.policies import SIDES
from sftplay.data.tokenize.report import where_rows_went
from sftplay.errors import ConfigError, DataError, MachineError, RunError, SftplayError

T = TypeVar("T")

POLL_S = 0.05
ABANDONED_S, STARTS_S = 5.0, 300.0
"""An unfinished store without a lock for this long has lost its writer, or at the start never had one.
Before the writer of this run starts there may be rows of an earlier run."""

KINDS: dict[str, type[SftplayError]] = {
    kind.__name__: kind for kind in (ConfigError, DataError, MachineError, RunError)
}


def get_failure_path(folder: Path) -> Path:
    """Return the path of the file in which the writer leaves its error."""
    return folder.with_name(f"{folder.name}.failed.json")


class StreamedStore(Store):
    """A store that another process writes."""

    def __init__(self, folder: Path, *, path: str, process: subprocess.Popen[bytes] | None = None) -> None:
        """Wait until the store shows something. `path` is that of the source's rows, for messages.

        `process` is the one that fills it, if this process started it.

        Raises SftplayError: the error of the writer.
        """
        self._final, self._path, self._process = folder, path, process
        self._was_held = False
        seen = self._wait_for(None)
        super().__init__(seen.folder, seen.index, seen.sides)
        self._show(seen)

    def chats(self) -> list[str]:
        return self._read(super().chats)

    def report(self) -> dict[str, Any]:
        return self._read(super().report)

    def _read(self, read: Callable[[], T]) -> T:
        """Read again while the folder is getting its final name."""
        for _ in range(20):
            try:
                return read()
            except FileNotFoundError:
                time.sleep(POLL_S)
                self.folder = self._final if (self._final / SEAL).exists() else self.folder
        return read()

    def refresh(self) -> None:
        """As `Store.refresh`: the writer may be further than what has been read."""
        if seen := self._open(self.index):
            self._show(seen)

    def _follow(self) -> None:
        """Wait until the index shows more, then show it too."""
        self._show(self._wait_for(self.index))
        if self.index.is_whole and not self.sides["train"].n_learned:
            raise nothing_to_learn(self, path=self._path)

    def _show(self, seen: Store) -> None:
        self.folder, self.index = seen.folder, seen.index
        for side in SIDES:
            vars(self.sides[side]).update(vars(seen.sides[side]), wait_for_more=self._follow)

    def _wait_for(self, known: Index | None) -> Store:
        """Return the store as soon as its index is another than the known one."""
        held_at = time.monotonic()
        while True:
            seen = self._open(known)
            if seen is not None:
                return seen
            failure, _ = examine_object(get_failure_path(self._final))
            if failure:
                kind = KINDS.get(str(failure["kind"]), RunError)
                raise kind(str(failure["what"]), where=str(failure["where"]), fix=str(failure["fix"]))
            now, has_ended = time.monotonic(), self._process is not None and self._process.poll() is not None
            if is_locked(get_lock_path(self._final)):
                held_at, self._was_held = now, True
            elif now - held_at > (ABANDONED_S if self._was_held or has_ended else STARTS_S):
                raise RunError(
                    "the process that tokenises the rows has ended before it was done",
                    where=self._path,
                    fix="look for its cause in the rank's log, then resume the run: what is tokenised is kept",
                )
            time.sleep(POLL_S)

    def _open(self, known: Index | None) -> Store | None:
        """Open the store where it shows more than the known index."""
        for folder in (self._final, unfinished_folder(self._final), self._final):  # it may be renamed between two looks
            if folder == self._final and not (folder / SEAL).exists():
                continue
            with suppress(OSError, ValueError):
                store = Store.open(folder)
                if known is None or store.index != known:
                    return store
        return None


def nothing_to_learn(store: Store, *, path: str) -> DataError:
    """Return the error about a source with a weight that teaches nothing: its share could never be reached."""
    went = where_rows_went(store.report()["sources"].get("train", {}))
    return DataError(
        f"nothing is left to learn: {went}",
        where=path,
        fix="give the source rows, hold out less of it, or weight: 0",
    )
