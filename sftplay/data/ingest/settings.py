"""The settings of an ingestion, and the part of them that the kept results of each stage depend on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sftplay import __version__

CLEANING = ("encoding", "unicode", "control", "spaces")
STEPS = (*CLEANING, "boilerplate", "duplicates", "near_duplicates")
"""Every step that can be left out with `--without`."""

ROWS = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz", ".parquet")
"""Files with one document in each row; only their column `text` is read, and it is not cleaned."""

Unit = Literal["document", "section"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One ingestion."""

    source: Path
    """A folder, or one file."""

    out: Path
    by: Unit = "document"
    without: tuple[str, ...] = ()
    near: float = 0.8
    """The least similarity at which the later of two texts is dropped."""

    min_chars: int = 50
    max_chars: int | None = None
    languages: tuple[str, ...] = ()
    """ISO 639-1 codes of those that are kept. Empty: all."""

    encoding: str = "auto"
    """Of text files without a byte order mark."""

    limit_s: float = 30.0
    """For one file. A streamed file gets one more second for each 4 MB."""

    memory_bytes: int = 10**9
    """For one file's reader."""

    workers: int = 1
    bad_files: Literal["report", "error"] = "report"
    tokenizer: str = ""

    def does(self, step: str) -> bool:
        """Whether a step is on."""
        return step not in self.without

    def reading_options(self) -> dict[str, Any]:
        """Return all settings that decide what is read from a file."""
        cleaned = [step for step in CLEANING if self.does(step)]
        lines = self.does("boilerplate")
        return {"kit": __version__, "encoding": self.encoding, "cleaning": cleaned, "lines": lines}

    def finishing_options(self) -> dict[str, Any]:
        """Return all settings that decide which records are made of what was read."""
        filters = {"min_chars": self.min_chars, "max_chars": self.max_chars, "languages": self.languages}
        return {"by": self.by, "signatures": self.does("near_duplicates"), "near": self.near, **filters}

    def all_options(self) -> dict[str, Any]:
        """Return all settings that OUT depends on."""
        compared = [step for step in ("duplicates", "near_duplicates") if self.does(step)]
        return {"reading": self.reading_options(), "finishing": self.finishing_options(), "compared": compared}
